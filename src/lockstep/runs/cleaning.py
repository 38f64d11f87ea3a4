"""Chooses and removes runs for `lockstep runs clean`: never one that is at work, never a folder with foreign files."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.record import folder_lock
from lockstep.record.run_folder import RUNNING
from lockstep.runs.reader import LOST
from lockstep.runs.table import QUEUED, Listed, is_surely_run, listed

# The statuses that are removed where none is named, if the run has no checkpoint.
USELESS = ("failed", LOST, "interrupted")
# Checkpoints that were set aside, or that a save was about to replace: one of them may be the only one left.
_RENAMED = ("aside-step-*", "damaged-step-*", ".partial-replaced-*")
# What Lockstep writes into a run's folder; anything else belongs to the user.
OURS = (
    "config.yaml", "launch.yaml", "topology.json", "summary.json", "metrics.jsonl", "evaluations.jsonl", "live.json",
    "timeline.jsonl", "timeline-driver.jsonl", "lags.jsonl", "logs", "checkpoints", "tensorboard", "profile", "samples",
    "loggers", "code", "job.sh", "slurm", "wandb", "report.html", ".lock*", ".lease", "*.partial", ".gone_back",
    ".seen-by-all-*", ".nfs*",
)  # fmt: skip
# What it writes into folders where users put files, too.
_INSIDE = {
    "logs": ("rank-[0-9]*.log", ".nfs*"),
    "samples": ("step-*", ".nfs*"),
    "checkpoints": ("step-*", "best", ".branch.json*", *_RENAMED, ".partial-*", ".nfs*"),
}
_SAMPLE_NAMES = ("*.png", "*.txt", "*.json", ".*.partial", ".nfs*")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_NAMED_FILES = 3


@dataclass(frozen=True)
class Chosen:
    run: Listed
    against: str | None  # why it must be kept
    bytes: int


def age(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|w)\s*", text)
    if match is None:
        raise ConfigError(f"--older-than {text}: not an age; write for example 12h, 7d or 4w")
    return float(match[1]) * _UNITS[match[2]]


def choose(
    runs: Iterable[Listed], statuses: Sequence[str], older_than: float, with_checkpoints: bool, now: float
) -> list[Chosen]:
    """Returns the runs with one of the statuses (USELESS by default) that are that old, and whether each may go."""
    asked = [each.replace("-", " ") for each in statuses] or USELESS
    return [
        Chosen(run, _against(run, with_checkpoints), size(run.folder))
        for run in runs
        if run.status in asked
        and now - run.changed >= older_than
        and (statuses or with_checkpoints or not (run.checkpoints or _renamed(run.folder)))
    ]


def remove(folder: Path, with_checkpoints: bool) -> None:
    """Removes a run while holding its lock, so that it is never seen half removed.

    Raises ConfigError if it must be kept after all: it may have been resumed since it was chosen.
    """
    if not is_surely_run(folder):
        raise ConfigError(f"{folder} is not the folder of a run any more")
    with folder_lock.locked(folder, "a clean-up"):
        against = _against(listed(folder), with_checkpoints, ours=True)
        if against is not None:
            raise ConfigError(f"{folder}: {against}")
        doomed = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
        try:
            folder.rename(doomed)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be removed: {error.strerror}") from None
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        raise ConfigError(f"{doomed}: what is left of {folder.name} cannot be removed: {error.strerror}") from None


def size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118  of many files
            except OSError:
                continue
    return total


def _against(run: Listed, with_checkpoints: bool, ours: bool = False) -> str | None:
    """Returns why a run must be kept; `ours` where this process itself holds it."""
    if not ours and (run.status == RUNNING or run.held_by is not None):
        return f"is at work: {run.held_by}"
    if run.status == QUEUED:
        return "has not begun: its job may be waiting in a queue. Cancel the job, and remove the folder yourself"
    if run.checkpoints and not with_checkpoints:
        return f"has {run.checkpoints} checkpoint{'s' if run.checkpoints > 1 else ''}: --with-checkpoints removes them"
    renamed = _renamed(run.folder)
    if renamed and not with_checkpoints:
        return f"has {renamed[0]}, which may be the only checkpoint left: --with-checkpoints removes it"
    others = _others(run.folder)
    if others:
        named = ", ".join(sorted(others)[:_NAMED_FILES]) + (", ..." if len(others) > _NAMED_FILES else "")
        return f"holds {named}, which no run writes: move it away, or remove the folder yourself"
    return None


def _renamed(folder: Path) -> list[str]:
    return sorted(each.name for pattern in _RENAMED for each in (folder / "checkpoints").glob(pattern))


def _others(folder: Path) -> list[str]:
    """Returns the paths of files and folders that no run writes, relative to the run's folder."""
    found = [each for each in folder.iterdir() if not _fits(each, OURS)]
    for name, patterns in _INSIDE.items():
        if (folder / name).is_dir():
            found += [each for each in (folder / name).iterdir() if not _fits(each, patterns)]
    samples = (each for step in (folder / "samples").glob("step-*") for each in step.rglob("*") if not each.is_dir())
    found += [each for each in samples if not _fits(each, _SAMPLE_NAMES)]
    return [str(each.relative_to(folder)) for each in found]


def _fits(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in patterns)
