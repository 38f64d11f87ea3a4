"""A run as its folder tells it: one frozen object, read at once, also while the run is at work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep import run_files
from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import Damaged, Unreadable
from lockstep.checkpoint.retention import Saved, best_first
from lockstep.checkpoint.storage import CheckpointStorage, Removed
from lockstep.config.load import parse_yaml
from lockstep.config.plain import LONGEST_CONFIG
from lockstep.config.strategy import MESH_TYPES
from lockstep.errors import ConfigError
from lockstep.record.holder import Holder
from lockstep.record.run_folder import CONFIG_FILE, RUNNING, SUMMARY_FILE, TOPOLOGY_FILE
from lockstep.runs.lags import Lags, read_lags
from lockstep.runs.live import Live, read_live
from lockstep.runs.records import number, read_json, read_lines, text, whole
from lockstep.runs.timeline import Entry, Span, read_timeline, spans_of

# What a script with its own loop was started with.
_LAUNCH_FILE = "launch.yaml"
# A run that is not seen from here, and was heard of this long ago, is at work; later than that, it is gone.
ALIVE_SECONDS = 60.0
LOST = "lost"  # the status of a run that says nothing any more, and never said how it ended


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
    rank: int
    host: str
    device: str
    physical_device: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class Topology:
    world_size: int = 0
    ranks: tuple[RankPlace, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)  # axes and their sizes, where they are known
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """One start of the run that failed: when, who, and why in a sentence."""

    at: float | None
    headline: str
    rank: int | None = None
    host: str = ""
    traceback: str = ""
    restarted: bool = False  # the run went on by itself


@dataclass(frozen=True)
class Run:
    """All that is known of a run."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    status: str
    rows: Sequence[Mapping[str, Any]]
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
        steps = [whole(self.summary.get("step")), whole(self.rows[-1].get("step")) if self.rows else None]
        if self.status in (RUNNING, LOST, "failed") and self.live is not None and self.live.at >= self._started:
            steps.append(max(self.live.step - 1, 0))  # the one that is under way is not made yet
        return max((each for each in steps if each is not None), default=0)

    @property
    def _started(self) -> float:
        """When it was last started, or restarted."""
        return max((each.at for each in self.timeline if each.kind in ("start", "restart")), default=0.0)


def is_run(folder: Path) -> bool:
    return any(run_files.is_file(folder / name) for name in (CONFIG_FILE, SUMMARY_FILE, _LAUNCH_FILE))


def read_run(
    folder: Path, now: float | None = None, over: bool = False, rows: Sequence[Mapping[str, Any]] | None = None
) -> Run:
    """ConfigError where there is no run. `over` is for whoever knows that nobody is at work in it any more, `rows` for
    whoever has them already."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not the folder of a run: there is no such folder")
    if not is_run(folder):
        raise ConfigError(f"{folder} is not the folder of a run: it holds neither {CONFIG_FILE} nor {SUMMARY_FILE}")
    config, summary = _config(folder), read_json(folder / SUMMARY_FILE)
    timeline, live = read_timeline(folder), read_live(folder)
    at_work = False if over else holder_is_there(folder)
    status = status_of(summary, timeline, live, time.time() if now is None else now, at_work)
    until = live.at if live is not None and status in (RUNNING, LOST) else None
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        summary=summary,
        status=status,
        rows=_rows(folder) if rows is None else rows,
        timeline=timeline,
        spans=spans_of(timeline, until),
        lags=read_lags(folder),
        live=live,
        topology=_topology(folder, config),
        checkpoints=_checkpoints(folder, config),
        failures=_failures(summary, timeline, status),
    )


def status_of(
    summary: Mapping[str, Any], timeline: Sequence[Entry], live: Live | None, now: float, at_work: bool | None = None
) -> str:
    """As the summary says; where that is of an earlier start, or was not written, as the timeline and the ranks do.

    `at_work` is whether the process that holds the folder is there, where that is known.
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


def holder_is_there(folder: Path) -> bool | None:
    """Whether a process holds the folder; None where that cannot be known: it would be on another host."""
    for name in (".lock", ".lock-rank"):
        with contextlib.suppress(OSError):
            holder = Holder.decode(run_files.read_bytes(folder / name, 4096))
            if holder is not None and not (holder.is_here and holder.is_gone):
                return True if holder.is_here else None
    return None if not (folder / ".lock").exists() else False


def _config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, _LAUNCH_FILE):
        with contextlib.suppress(OSError, yaml.YAMLError, ConfigError, RecursionError, ValueError):
            found = parse_yaml(run_files.read_text(folder / name, LONGEST_CONFIG))
            if isinstance(found, dict):
                settings = found.get("settings") if name == _LAUNCH_FILE else None
                return settings if isinstance(settings, dict) else found
    return {}


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder / "metrics.jsonl") if number(row.get("step")) is not None]


def _topology(folder: Path, config: Mapping[str, Any]) -> Topology:
    told = read_json(folder / TOPOLOGY_FILE)
    ranks = told.get("ranks")
    if not isinstance(ranks, list):
        return Topology()
    places = [
        RankPlace(
            whole(each.get("rank")) or 0, text(each.get("host")), text(each.get("device")),
            text(each.get("physical_device")), whole(each.get("pid")),
        )
        for each in ranks
        if isinstance(each, dict)
    ]  # fmt: skip
    first = next((each for each in ranks if isinstance(each, dict)), {})
    versions = {name: text(first.get(name)) for name in ("lockstep", "torch", "python") if text(first.get(name))}
    size = whole(told.get("world_size")) or len(places)
    return Topology(size, tuple(sorted(places, key=lambda each: each.rank)), _mesh(config, size), versions)


def _mesh(config: Mapping[str, Any], size: int) -> dict[str, int]:
    """The axes that ranks lie along; none where the mesh is not one of processes."""
    strategy = config.get("strategy")
    axes = strategy.get("mesh") if isinstance(strategy, dict) and strategy.get("type") in MESH_TYPES else None
    if not isinstance(axes, dict) or not all(type(each) is int for each in axes.values()):
        return {}
    known = 1
    for each in axes.values():
        known *= each if each > 0 else 1
    if known < 1:
        return {}
    found = {str(axis): size // known if each == -1 else each for axis, each in axes.items()}
    product = 1
    for each in found.values():
        product *= each
    return found if product == size else {}


def _checkpoints(folder: Path, config: Mapping[str, Any]) -> list[SavedCheckpoint]:
    storage = CheckpointStorage(folder / "checkpoints")
    found = [each for step in storage.steps() if (each := _checkpoint(storage, step)) is not None]
    saving = config.get("checkpoint")
    keep = saving.get("keep") if isinstance(saving, dict) else None
    mode = text(keep.get("mode")) if isinstance(keep, dict) else ""
    best = best_first([Saved(each.step, each.value) for each in found], mode or "min")
    chosen = best[0].step if best else None
    return [_marked(each, each.step == chosen) for each in found]


def _marked(saved: SavedCheckpoint, best: bool) -> SavedCheckpoint:
    return SavedCheckpoint(**{**vars(saved), "best": best})


def _checkpoint(storage: CheckpointStorage, step: int) -> SavedCheckpoint | None:
    try:
        told = storage.look(step, manifest.read)
        size = sum(each["bytes"] for each in told["files"].values())
    except (Damaged, Unreadable, OSError, KeyError, TypeError, AttributeError) as error:
        return SavedCheckpoint(step, problem=str(error))
    except Removed:
        return None
    return SavedCheckpoint(step, number(told.get("epoch")), text(told.get("created")), size, number(told.get("value")))


def _failures(summary: Mapping[str, Any], timeline: Sequence[Entry], status: str) -> list[Failure]:
    found = [
        Failure(each.at, _headline(each), each.rank, each.host, each.traceback, each.kind == "restart")
        for each in timeline
        if each.kind == "restart" or (each.kind == "end" and each.status == "failed")
    ]
    if status == "failed" and not any(not each.restarted for each in found):
        found.append(Failure(None, text(summary.get("reason")) or "no rank said why"))
    return found


def _headline(entry: Entry) -> str:
    if entry.rank is None:
        return entry.note
    of = f" of {entry.world_size}" if entry.world_size else ""
    return f"rank {entry.rank}{of}{f' on {entry.host}' if entry.host else ''} failed: {entry.note}"
