"""What a rank reports at the roll call, and what is wrong with the reports."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lockstep.config.changes import changes
from lockstep.config.plain import columns
from lockstep.distributed.activity import Beat
from lockstep.distributed.topology import ranks_text
from lockstep.errors import RollCallError


@dataclass(frozen=True)
class Report:
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    physical_device: str
    world_size: int
    runtime_world: int | None  # the world size of the device runtime, if it has one
    python: str
    torch: str
    lockstep: str
    config: str  # digests
    source: str


@dataclass(frozen=True)
class Evidence:
    """Details that are compared only if digests differ."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    config: dict[str, Any]
    source: dict[str, str]  # file -> digest


_KINDS: Mapping[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Report, Evidence)}
Said = TypeVar("Said", Report, Evidence)


def decoded(kind: type[Said], data: bytes | None) -> Said:
    """Decodes a report or evidence from the network and checks its types."""
    try:
        said: Said = _KINDS[kind].validate_json(data or b"")
    except ValidationError:
        raise RollCallError(
            f"a rank sent something that is no {kind.__name__.lower()} of a rank: {(data or b'')[:80]!r}. Check that "
            "all hosts have the same version of Lockstep"
        ) from None
    return said


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a config that ranks must agree on: not the folder of the task, whose files have digests."""
    task = config.get("task")
    if not task:
        return dict(config)
    return {**config, "task": {**task, "type": Path(task["type"]).name}}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def table(reports: list[Report], marked: set[int] | None = None) -> list[str]:
    header = ("rank", "host", "pid", "device", "physical device")
    rows = [(str(r.rank), r.host, str(r.pid), r.device, r.physical_device) for r in reports]
    first, *rest = columns([header, *rows])
    marks = ["> " if marked and report.rank in marked else "  " for report in reports]
    return ["  " + first, *(mark + line for mark, line in zip(marks, rest, strict=True))]


@dataclass(frozen=True)
class Source:
    """Digests of the files of a task, by their paths below a folder."""

    root: Path
    digests: dict[str, str]


def source_files(thing: Any) -> Source:
    """Returns the digests of the file that defines a class or function, and of its loaded neighbours.

    Neighbours are modules of the same package, or of the same folder for a single file. Installed packages are compared
    by version instead.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    module = sys.modules.get(getattr(thing, "__module__", ""))
    file = getattr(module, "__file__", None) or _file_of(thing)
    if file is None:
        return Source(Path(), {})
    home = Path(file).resolve()
    root = root_of(module, home)
    # Thousands of modules are loaded: comparing prefixes avoids most system calls.
    beginnings = tuple({f"{root}{os.sep}", f"{root_of(module, Path(file))}{os.sep}"})
    found = {home}
    for loaded in list(sys.modules.values()):
        other = getattr(loaded, "__file__", None)
        if isinstance(other, str) and other.startswith(beginnings) and other.endswith(".py"):
            path = Path(other).resolve()
            if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
                found.add(path)
    contents = {str(path.relative_to(root)): path.read_bytes() for path in sorted(found) if path.is_file()}
    return Source(root, {name: hashlib.sha256(data).hexdigest()[:16] for name, data in contents.items()})


def root_of(module: Any, home: Path) -> Path:
    """Returns the folder of the outermost package of a module, or the folder of its file."""
    depth = getattr(module, "__name__", "").count(".")
    if not depth:
        return home.parent
    root = home.parent if home.name == "__init__.py" else home
    for _ in range(depth):
        root = root.parent
    return root


def _file_of(thing: Any) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except (TypeError, OSError):  # of a class that was typed into an interpreter
        return None


SHOWN = 32


@dataclass(frozen=True)
class Fault:
    text: str
    ranks: tuple[int, ...]
    missing: bool = False  # whether these ranks did not report at all


def find_faults(reports: list[Report], world_size: int, share_devices: bool) -> list[Fault]:
    """Returns everything that is wrong with the reports, gravest first."""
    reports = sorted(reports, key=lambda each: each.rank)
    return [
        *_rank_faults(reports, world_size),
        *_unequal(reports, "world_size", "WORLD_SIZE differs"),
        *_runtime_faults(reports),
        *([] if share_devices else _device_faults(reports)),
        *_unequal(reports, "python", "the versions of Python differ"),
        *_unequal(reports, "torch", "the versions of torch differ"),
        *_unequal(reports, "lockstep", "the versions of Lockstep differ"),
    ]


def differences(reports: Mapping[int, Report], evidence: Callable[[int], Evidence]) -> list[Fault]:
    """Returns which settings and files differ from rank 0's."""
    reference = next((number for number, each in reports.items() if each.rank == 0), None)
    if reference is None:
        return []
    zero = reports[reference]
    faults = []
    for number, report in reports.items():
        if (report.config, report.source) == (zero.config, zero.source):
            continue
        theirs, ours = evidence(number), evidence(reference)
        settings = "; ".join(
            f"{change.path} is {change.after!r}, on rank 0 {change.before!r}"
            for change in changes(ours.config, theirs.config)
        )
        if settings:
            faults.append(Fault(f"rank {report.rank} has another config: {settings}", (report.rank,)))
        # Some imports depend on the rank: a file that only one rank has loaded is fine.
        files = [file for file, value in theirs.source.items() if ours.source.get(file, value) != value]
        if files:
            names = ", ".join(sorted(files))
            faults.append(
                Fault(
                    f"rank {report.rank} has another version of the task's source: {names} on {report.host} differs "
                    f"from rank 0's on {zero.host}",
                    (report.rank,),
                )
            )
    return faults


def render(faults: list[Fault], reports: list[Report], missing: Mapping[int, Beat | None] | None = None) -> str:
    """Returns one message: the faults, and a table of the ranks with those concerned marked."""
    lines = ["the roll call failed:", *(f"  - {fault.text}" for fault in faults)]
    for rank, beat in (missing or {}).items():
        seen = f"last seen {beat.describe()} for {beat.still:.0f} s" if beat else "was never seen"
        lines.append(f"    rank {rank} {seen}")
    marked = {rank for fault in faults for rank in fault.ranks}
    ordered = sorted(reports, key=lambda each: (each.rank not in marked, each.rank))
    shown = sorted(ordered[:SHOWN], key=lambda each: each.rank)
    lines += ["", *table(shown, marked)]
    if len(reports) > SHOWN:
        lines.append(f"  and {len(reports) - SHOWN} more")
    return "\n".join(lines)


def _rank_faults(reports: list[Report], world_size: int) -> list[Fault]:
    faults = []
    by_rank: dict[int, list[Report]] = {}
    for report in reports:
        by_rank.setdefault(report.rank, []).append(report)
    for rank, claims in sorted(by_rank.items()):
        if not 0 <= rank < world_size:
            faults.append(Fault(f"rank {rank} does not exist in a world of {world_size}", (rank,)))
        if len(claims) > 1:
            who = " and ".join(f"process {each.pid} on {each.host}" for each in claims)
            faults.append(
                Fault(f"rank {rank} is claimed {len(claims)} times, by {who}: give every process its own RANK", (rank,))
            )
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing:
        faults.append(Fault(f"{ranks_text(missing)} of {world_size} did not arrive", tuple(missing), missing=True))
    return faults


def _runtime_faults(reports: list[Report]) -> list[Fault]:
    wrong = [each for each in reports if each.runtime_world not in (None, each.world_size)]
    return [
        Fault(
            f"rank {each.rank}: the device runtime believes in a world of {each.runtime_world}, "
            f"the run has {each.world_size} ranks: its collectives would leave the others out",
            (each.rank,),
        )
        for each in wrong
    ]


def _device_faults(reports: list[Report]) -> list[Fault]:
    holders: dict[str, list[int]] = {}
    for report in reports:
        holders.setdefault(report.physical_device, []).append(report.rank)
    return [
        Fault(
            f"{ranks_text(ranks)} are on the same physical device, {device}: give every process its own "
            "(LOCAL_RANK, CUDA_VISIBLE_DEVICES), or allow it with launch.share_devices: true",
            tuple(ranks),
        )
        for device, ranks in holders.items()
        if len(set(ranks)) > 1
    ]


def _unequal(reports: list[Report], name: str, headline: str) -> list[Fault]:
    values: dict[Any, list[int]] = {}
    for report in reports:
        values.setdefault(getattr(report, name), []).append(report.rank)
    if len(values) < 2:
        return []
    common = max(values, key=lambda value: len(values[value]))
    odd = tuple(rank for value, ranks in values.items() if value != common for rank in ranks)
    said = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())
    return [Fault(f"{headline}: {said}", odd)]
