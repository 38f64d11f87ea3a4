"""The table of `lockstep runs`: status, progress, best value and duration of every run in a folder."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.retention import best_first, judged_by
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.plain import number, text, whole
from lockstep.errors import CheckpointError, ConfigError
from lockstep.record import folder_lock, run_folder
from lockstep.record.writers import METRICS_FILE
from lockstep.runs.findings import duration
from lockstep.runs.reader import LOST, is_surely_run, last_change, read_state, run_folders
from lockstep.runs.records import NOT_METRICS, newest_row
from lockstep.shown import brief, in_a_line

_STAMP = re.compile(r"-(\d{8}-\d{6})(?:-\d+)?$")
_LONGEST_REASON = 60


@dataclass(frozen=True)
class Listed:
    folder: Path
    name: str  # below the folder that was listed
    status: str  # as in summary.json; running only while a process works on it, else lost; queued before that
    reason: str
    epoch: int | None
    step: int | None
    metric: str | None
    mode: str
    best: float | None
    best_step: int | None
    seconds: float | None
    started: float  # seconds since the epoch
    changed: float  # when something was last written
    metrics: Mapping[str, float]  # the newest, while it runs, or the last ones
    checkpoints: int
    held_by: str | None

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def found(folder: Path) -> list[Listed]:
    """Returns all runs of a folder, and those of the sweeps in it."""
    if is_surely_run(folder):
        raise ConfigError(f"{folder} is a run itself: name the folder that it is in")
    return [listed(each, str(each.relative_to(folder))) for each in run_folders(folder) if is_surely_run(each)]


def listed(folder: Path, name: str) -> Listed:
    state, holder = read_state(folder), folder_lock.held_by(folder)
    status, summary, running = state.status, state.summary, state.status == run_folder.RUNNING
    last, metrics = newest_row(folder / METRICS_FILE), summary.get("metrics")
    metrics = metrics if isinstance(metrics, dict) and metrics and not running else last
    metric, mode, best, best_step = _best(folder, summary)
    started = _started(folder)
    changed = max(started, last_change(folder))
    seconds = number(summary.get("seconds"))
    if running or status == LOST:
        seconds = (time.time() if running else changed) - started
    return Listed(
        folder=folder,
        name=name,
        status=status,
        reason="" if running else text(summary.get("reason")).strip().split("\n")[0],
        epoch=_newest(summary.get("epoch"), last.get("epoch")),
        step=_newest(summary.get("step"), last.get("step"), state.live.step if state.live and running else None),
        metric=metric,
        mode=mode,
        best=best,
        best_step=best_step,
        seconds=seconds,
        started=started,
        changed=changed,
        metrics={
            name: value
            for name, each in metrics.items()
            if name not in NOT_METRICS and (value := number(each)) is not None
        },
        checkpoints=sum(1 for _ in (folder / "checkpoints").glob("step-*")),
        held_by=None if holder is None else str(holder),
    )


def _newest(*values: Any) -> int | None:
    return max((each for each in map(whole, values) if each is not None), default=None)


def matching(runs: Iterable[Listed], statuses: Sequence[str], patterns: Sequence[str]) -> list[Listed]:
    """Returns the runs with one of the statuses and a name that fits a pattern; a plain word fits anywhere in it."""
    wanted = [each if any(sign in each for sign in "*?[") else f"*{each}*" for each in patterns]
    return [
        each
        for each in runs
        if (not statuses or each.status.replace(" ", "-") in statuses)
        and (not wanted or any(fnmatch.fnmatchcase(each.name, pattern) for pattern in wanted))
    ]


SORTS: dict[str, Callable[[Listed], float | str | None]] = {
    "started": lambda run: -run.started,
    "name": lambda run: run.name,
    "status": lambda run: run.status,
    "step": lambda run: None if run.step is None else -run.step,
    "best": lambda run: None if run.best is None else run.best * (1 if run.mode == "min" else -1),
    "duration": lambda run: None if run.seconds is None else -run.seconds,
}


def ordered(runs: Iterable[Listed], by: str = "started", reverse: bool = False) -> list[Listed]:
    """Sorts the newest, furthest, best or longest first; runs without such a value are last either way."""
    key, runs = SORTS[by], sorted(runs, key=lambda run: run.name)
    known = [run for run in runs if key(run) is not None]
    rest = [run for run in runs if key(run) is None]
    return [*sorted(known, key=lambda run: key(run), reverse=reverse), *rest]  # type: ignore[arg-type,return-value]


def rows(runs: Iterable[Listed]) -> list[list[str]]:
    """Returns the head of the table and the cells of every run."""
    cells: list[Sequence[str]] = [("run", "status", "epoch", "step", "best", "", "duration", "started", "")]
    for run in runs:
        best = "" if run.best is None else f"{run.best:.4g}"
        at = "" if run.best is None else f"{run.metric or ''} at {run.best_step}".strip()
        why = brief(run.reason, _LONGEST_REASON) if run.status != "completed" else ""
        cells.append((
            run.name, run.status, _shown(run.epoch), _shown(run.step), best, at,
            "" if run.seconds is None else duration(run.seconds),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)), why,
        ))  # fmt: skip
    return [[in_a_line(cell) for cell in row] for row in cells]


def _best(folder: Path, summary: Mapping[str, Any]) -> tuple[str | None, str, float | None, int | None]:
    """Returns the metric, its mode, the best value and its step: by the summary, or else by the checkpoints."""
    best = summary.get("best")
    if isinstance(best, Mapping):
        metric, mode = text(best.get("metric")) or None, text(best.get("mode")) or "min"
        return metric, mode, number(best.get("value")), whole(best.get("step"))
    with contextlib.suppress(CheckpointError):
        if saved := best_first(CheckpointStorage(folder / "checkpoints").saved(), "min"):
            metric, mode = judged_by(folder)  # all of a config takes a while to parse, and there may be a thousand runs
            found = best_first(saved, mode)[0]
            return metric, mode, found.value, found.step
    return None, "min", None, None


def _started(folder: Path) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        if match := _STAMP.search(folder.name):
            return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    times = []
    for name in run_folder.START_FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=0.0)


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)
