"""The table of `lockstep runs`: status, progress, best value and duration of every run in a folder."""

from __future__ import annotations

import contextlib
import fnmatch
import os
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
from lockstep.config.plain import LONGEST_CONFIG
from lockstep.errors import CheckpointError, ConfigError
from lockstep.record import folder_lock, run_folder
from lockstep.record.timeline import newest_row
from lockstep.runs.findings import duration
from lockstep.runs.reader import LOST, holder_is_there, status_of
from lockstep.runs.records import number, read_live, read_timeline, whole
from lockstep.shown import brief, in_a_line

QUEUED = "queued"  # the job has not begun
_STARTS = (run_folder.CONFIG_FILE, "launch.yaml")  # the second: of a script with its own loop
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


def is_surely_run(folder: Path) -> bool:
    """Whether a folder is that of a run, and no link or project with a config.yaml."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and any(run_files.is_file(folder / name) for name in _STARTS)
        and (run_files.is_file(folder / run_folder.SUMMARY_FILE) or run_files.is_folder(folder / "logs"))
    )


def found(folder: Path) -> list[Listed]:
    """Returns all runs of a folder, and those of the sweeps in it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; runs are in runs/, or where --out was")
    if is_surely_run(folder):
        raise ConfigError(f"{folder} is a run itself: name the folder that it is in")
    runs = []
    for each in _folders(folder):
        if is_surely_run(each):
            runs.append(listed(each, each.name))
        elif run_files.is_file(each / "sweep.yaml"):
            runs += [listed(trial, f"{each.name}/{trial.name}") for trial in _folders(each) if is_surely_run(trial)]
    return runs


def listed(folder: Path, name: str = "") -> Listed:
    summary = run_folder.read_summary(folder)
    holder, live = folder_lock.held_by(folder), read_live(folder)
    timeline = read_timeline(folder)
    at_work = True if holder is not None else holder_is_there(folder)
    known = bool(summary or timeline or live or holder)
    status = status_of(summary, timeline, live, time.time(), at_work) if known else QUEUED
    last = newest_row(folder / "metrics.jsonl") or {}
    metric, mode = _judged_by(folder)
    best, best_step = _best(folder, summary, mode)
    started = _started(folder)
    changed = max(
        [started, *(_written(folder / each) for each in ("summary.json", "metrics.jsonl", "live.json", "logs"))]
    )
    seconds = number(summary.get("seconds"))
    if status in (run_folder.RUNNING, LOST):
        seconds = (time.time() if status == run_folder.RUNNING else changed) - started
    return Listed(
        folder=folder,
        name=name or folder.name,
        status=status,
        reason=str(summary.get("reason") or "").strip().split("\n")[0] if status != run_folder.RUNNING else "",
        epoch=_newest(summary.get("epoch"), last.get("epoch")),
        step=_newest(
            summary.get("step"), last.get("step"), live.step if live and status == run_folder.RUNNING else None
        ),
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
    return [
        each
        for each in runs
        if (not statuses or each.status.replace(" ", "-") in statuses)
        and (not patterns or any(_fits(each.name, pattern) for pattern in patterns))
    ]


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern if any(each in pattern for each in "*?[") else f"*{pattern}*")


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
    known = [run for run in runs if key(run) is not None and key(run) == key(run)]
    rest = [run for run in runs if not any(run is each for each in known)]
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


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / each.name for each in entries if each.is_dir(follow_symlinks=False))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from None


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
    match = _STAMP.search(folder.name)
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S")) if match else _begun(folder)
    return _begun(folder)


def _begun(folder: Path) -> float:
    return max(_written(folder / name) for name in _STARTS)


def _written(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.lstat().st_mtime
    return 0.0


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)
