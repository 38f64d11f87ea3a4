"""A run as its folder describes it: one frozen object, read at once, also while the run is at work."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep import run_files
from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import Damaged, Unreadable
from lockstep.checkpoint.retention import Saved, best_first
from lockstep.checkpoint.storage import CheckpointStorage, Removed
from lockstep.config.load import parse_yaml
from lockstep.config.plain import LONGEST_CONFIG, text, whole
from lockstep.config.strategy import MESH_TYPES
from lockstep.errors import ConfigError
from lockstep.record import folder_lock
from lockstep.record.run_folder import CONFIG_FILE, RUNNING, START_FILES, SUMMARY_FILE, TOPOLOGY_FILE
from lockstep.record.writers import read_json
from lockstep.runs.records import (
    Curve,
    Entry,
    Lags,
    Live,
    Span,
    parsed,
    read_curves,
    read_lags,
    read_live,
    read_timeline,
    spans_of,
)

_LAUNCH_FILE = START_FILES[1]  # how a script with its own loop was started
# A run whose process cannot be seen from here is running if it wrote something within this time, else lost.
ALIVE_SECONDS = 60.0
LOST = "lost"  # it writes nothing any more, and did not write how it ended
QUEUED = "queued"  # the job has not begun


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    epoch: float | None = None
    created: str = ""
    size: int | None = None  # bytes
    value: float | None = None
    best: bool = False
    problem: str = ""


@dataclass(frozen=True)
class RankPlace:
    rank: int = 0
    host: str = ""
    device: str = ""
    physical_device: str = ""


@dataclass(frozen=True)
class Topology:
    world_size: int = 0
    ranks: tuple[RankPlace, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)  # axes and their sizes, where they are known
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    at: float | None
    headline: str
    traceback: str = ""
    restarted: bool = False  # the run went on by itself


@dataclass(frozen=True)
class Run:
    folder: Path
    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    status: str
    curves: Mapping[str, Curve]
    timeline: Sequence[Entry]
    spans: Sequence[Span]
    lags: Lags
    live: Live | None
    topology: Topology
    checkpoints: Sequence[SavedCheckpoint]
    failures: Sequence[Failure]

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING

    @property
    def step(self) -> int:
        newest = (last for each in self.curves.values() for last in (*each.steps[-1:], *each.not_finite[-1:]))
        steps = [whole(self.summary.get("step")), whole(int(max(newest, default=0)))]
        if self.status in (RUNNING, LOST, "failed") and self.live is not None and self.live.at >= self._started:
            steps.append(max(self.live.step - 1, 0))  # the one that is under way is not made yet
        return max((each for each in steps if each is not None), default=0)

    @property
    def _started(self) -> float:
        return max((each.at for each in self.timeline if each.kind in ("start", "restart")), default=0.0)


def is_run(folder: Path) -> bool:
    return any(run_files.is_file(folder / name) for name in (CONFIG_FILE, SUMMARY_FILE, _LAUNCH_FILE))


def is_surely_run(folder: Path) -> bool:
    """Whether a folder is that of a run, and no link or project with a config.yaml."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and any(run_files.is_file(folder / name) for name in START_FILES)
        and (run_files.is_file(folder / SUMMARY_FILE) or run_files.is_folder(folder / "logs"))
    )


def run_folders(root: Path) -> Iterator[Path]:
    """Yields the folders of the runs in a folder, and of the runs of sweeps in it."""
    for folder in _below(root):
        if is_run(folder):
            yield folder
        else:
            yield from (each for each in _below(folder) if is_run(each))


def _below(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
                yield each


def last_change(folder: Path) -> float:
    """Returns when something was last written to a run's folder."""
    times = []
    for name in ("live.json", "metrics.jsonl", SUMMARY_FILE, "logs", *START_FILES):
        with contextlib.suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=0.0)


@dataclass(frozen=True)
class State:
    """How a run is, by its small files."""

    status: str
    summary: Mapping[str, Any]
    timeline: Sequence[Entry]
    live: Live | None


def read_state(folder: Path, now: float | None = None, over: bool = False) -> State:
    """`over` says that no process works on it any more."""
    summary, timeline, live = read_json(folder / SUMMARY_FILE), read_timeline(folder), read_live(folder)
    at_work = False if over else folder_lock.is_at_work(folder)
    if not (summary or timeline or live or at_work):
        return State(QUEUED, summary, timeline, live)
    status = status_of(summary, timeline, live, time.time() if now is None else now, at_work)
    return State(status, summary, timeline, live)


def read_run(folder: Path, now: float | None = None, over: bool = False) -> Run:
    """Reads a run; raises ConfigError where there is none. `over` says that no process works on it any more."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not the folder of a run: there is no such folder")
    if not is_run(folder):
        raise ConfigError(f"{folder} is not the folder of a run: it holds neither {CONFIG_FILE} nor {SUMMARY_FILE}")
    config, state = _config(folder), read_state(folder, now, over)
    until = state.live.at if state.live is not None and state.status in (RUNNING, LOST) else None
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        summary=state.summary,
        status=state.status,
        curves=read_curves(folder),
        timeline=state.timeline,
        spans=spans_of(state.timeline, until),
        lags=read_lags(folder),
        live=state.live,
        topology=_topology(folder, config),
        checkpoints=_checkpoints(folder, config),
        failures=_failures(state),
    )


def status_of(
    summary: Mapping[str, Any], timeline: Sequence[Entry], live: Live | None, now: float, at_work: bool | None = None
) -> str:
    """Returns the status in the summary, or by the timeline and the ranks where the summary is of an earlier start.

    `at_work` says whether the process that holds the folder exists, where that is known.
    """
    said = text(summary.get("status")) or RUNNING
    marks = [each for each in timeline if each.kind in ("start", "end", "restart", "train")]
    if marks and marks[-1].kind == "end":
        return (marks[-1].status or said) if said == RUNNING else said
    if at_work is None:
        heard = max((each.until or each.at for each in timeline), default=0.0)
        at_work = now - max(heard, live.at if live is not None else 0.0) <= ALIVE_SECONDS
    if at_work:
        return RUNNING if marks else said
    return LOST if said == RUNNING else said


def _config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, _LAUNCH_FILE):
        with contextlib.suppress(OSError, yaml.YAMLError, ConfigError, RecursionError, ValueError):
            found = parse_yaml(run_files.read_text(folder / name, LONGEST_CONFIG))
            if isinstance(found, dict):
                settings = found.get("settings") if name == _LAUNCH_FILE else None
                return settings if isinstance(settings, dict) else found
    return {}


def _topology(folder: Path, config: Mapping[str, Any]) -> Topology:
    found = read_json(folder / TOPOLOGY_FILE)
    ranks = found.get("ranks")
    if not isinstance(ranks, list):
        return Topology()
    known = [each for each in ranks if isinstance(each, dict)]
    places = [parsed(RankPlace, each) for each in known]
    first = known[0] if known else {}
    versions = {name: text(first.get(name)) for name in ("lockstep", "torch", "python") if text(first.get(name))}
    size = whole(found.get("world_size")) or len(places)
    return Topology(size, tuple(sorted(places, key=lambda each: each.rank)), _mesh(config, size), versions)


def _mesh(config: Mapping[str, Any], size: int) -> dict[str, int]:
    """Returns the axes of the mesh, or none where it is not one of processes."""
    strategy = config.get("strategy")
    axes = strategy.get("mesh") if isinstance(strategy, dict) and strategy.get("type") in MESH_TYPES else None
    if not isinstance(axes, dict) or not all(type(each) is int for each in axes.values()):
        return {}
    known = math.prod(each for each in axes.values() if each > 0)
    found = {str(axis): size // known if each == -1 else each for axis, each in axes.items()}
    return found if math.prod(found.values()) == size else {}


def _checkpoints(folder: Path, config: Mapping[str, Any]) -> list[SavedCheckpoint]:
    storage = CheckpointStorage(folder / "checkpoints")
    found = [each for step in storage.steps() if (each := _checkpoint(storage, step)) is not None]
    saving = config.get("checkpoint")
    keep = saving.get("keep") if isinstance(saving, dict) else None
    mode = text(keep.get("mode")) if isinstance(keep, dict) else ""
    best = best_first([Saved(each.step, each.value) for each in found], mode or "min")
    chosen = best[0].step if best else None
    return [replace(each, best=each.step == chosen) for each in found]


def _checkpoint(storage: CheckpointStorage, step: int) -> SavedCheckpoint | None:
    try:
        found = storage.look(step, manifest.read)
        size = sum(each["bytes"] for each in found["files"].values())
    except (Damaged, Unreadable, OSError, KeyError, TypeError, AttributeError) as error:
        return SavedCheckpoint(step, problem=str(error))
    except Removed:
        return None
    read = parsed(SavedCheckpoint, {name: found.get(name) for name in ("epoch", "created", "value")} | {"step": step})
    return replace(read, size=size)


def _failures(state: State) -> list[Failure]:
    found = [
        Failure(each.at, _headline(each), each.traceback, each.kind == "restart")
        for each in state.timeline
        if each.kind == "restart" or (each.kind == "end" and each.status == "failed")
    ]
    if state.status == "failed" and all(each.restarted for each in found):
        found.append(Failure(None, text(state.summary.get("reason")) or "no rank said why"))
    return found


def _headline(entry: Entry) -> str:
    if entry.rank is None:
        return entry.note
    of = f" of {entry.world_size}" if entry.world_size else ""
    return f"rank {entry.rank}{of}{f' on {entry.host}' if entry.host else ''} failed: {entry.note}"
