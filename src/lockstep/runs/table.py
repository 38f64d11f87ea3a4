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

import yaml

from lockstep import run_files
from lockstep.checkpoint.retention import best_first
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.load import parse_yaml
from lockstep.config.plain import LONGEST_CONFIG, number, whole
from lockstep.errors import CheckpointError, ConfigError
from lockstep.record import folder_lock, run_folder
from lockstep.record.timeline import newest_row
from lockstep.runs.findings import duration
from lockstep.runs.reader import LOST, is_surely_run, last_change, read_state, run_folders
from lockstep.shown import brief, in_a_line

_STAMP = re.compile(r"-(\d{8}-\d{6})(?:-\d+)?$")
_LONGEST_REASON = 60
# The section of a config: to parse all of it takes ten times as long, and there may be a thousand runs.
_CHECKPOINT = re.compile(r"^checkpoint:.*\n(?:[ \t].*\n|\n)*", re.M)


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
    last = newest_row(folder / "metrics.jsonl") or {}
    metric, mode = _judged_by(folder)
    best, best_step = _best(folder, summary, mode)
    started = _started(folder)
    changed = max(started, last_change(folder))
    seconds = number(summary.get("seconds"))
    if running or status == LOST:
        seconds = (time.time() if running else changed) - started
    return Listed(
        folder=folder,
        name=name,
        status=status,
        reason="" if running else str(summary.get("reason") or "").strip().split("\n")[0],
        epoch=_newest(summary.get("epoch"), last.get("epoch")),
        step=_newest(summary.get("step"), last.get("step"), state.live.step if state.live and running else None),
        metric=metric if best is not None else None,
        mode=mode,
        best=best,
        best_step=best_step,
        seconds=seconds,
        started=started,
        changed=changed,
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


def _best(folder: Path, summary: Mapping[str, Any], mode: str) -> tuple[float | None, int | None]:
    """Returns the best value and its step, from the summary or else from the checkpoints."""
    best = summary.get("best")
    if isinstance(best, Mapping):
        return number(best.get("value")), whole(best.get("step"))
    with contextlib.suppress(CheckpointError):
        for each in best_first(CheckpointStorage(folder / "checkpoints").saved(), mode):
            return each.value, each.step
    return None, None


def _judged_by(folder: Path) -> tuple[str | None, str]:
    """Returns the metric that best checkpoints are kept by, and its mode."""
    with contextlib.suppress(OSError, yaml.YAMLError):
        config = run_files.read_text(folder / run_folder.CONFIG_FILE, LONGEST_CONFIG)
        section = _CHECKPOINT.search(config)
        keep: Any = parse_yaml(section[0] if section else config)
        for key in ("checkpoint", "keep"):
            keep = keep.get(key) if isinstance(keep, Mapping) else None
        keep = keep if isinstance(keep, Mapping) else {}
        return str(keep.get("metric", "val/loss")), str(keep.get("mode", "min"))
    return None, "min"


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
