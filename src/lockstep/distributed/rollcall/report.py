"""What a rank says of itself at the roll call, and how it is shown."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.plain import columns
from lockstep.errors import RollCallError


@dataclass(frozen=True)
class Report:
    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    physical_device: str
    world_size: int
    runtime_world: int | None  # what the device runtime believes; None where it has no opinion of its own
    python: str
    torch: str
    lockstep: str
    config: str  # digests
    source: str


@dataclass(frozen=True)
class Evidence:
    """What a rank brings along in case its digests differ from the others'."""

    config: Mapping[str, Any]
    source: Mapping[str, str]  # file -> digest


Said = TypeVar("Said", Report, Evidence)


def decoded(kind: type[Said], data: bytes | None) -> Said:
    """A report, or evidence, as it came over the network: all of its fields, each of its type."""
    try:
        said = kind(**json.loads(data or b"null"))
        fits = all(type(getattr(said, each.name)) in _types(each.type) for each in fields(said))
    except (ValueError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise RollCallError(
            f"a rank sent something that is no {kind.__name__.lower()} of a rank: {(data or b'')[:80]!r}. Check that "
            "all hosts have the same version of Lockstep"
        )
    return said


def _types(annotation: Any) -> tuple[type, ...]:
    text = str(annotation)
    if text.startswith("Mapping"):
        return (dict,)
    named = {"int": int, "str": str, "None": type(None)}
    return tuple(named[each.strip()] for each in text.split("|"))


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as far as ranks must agree on it: where a host keeps the task's file is its own affair.

    What is in the file is compared by its digest.
    """
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
    """The files of a task: digests by their paths below a folder."""

    root: Path
    digests: dict[str, str]


def source_files(thing: Any) -> Source:
    """The file that a class or function is defined in, and its loaded neighbours.

    Neighbours are modules of the same package, or of the same folder where it is a file on its own. Files that are
    installed, and are not the task itself, are left to the comparison of versions.
    """
    while isinstance(thing, functools.partial):  # of the function inside: the partial itself is functools' own
        thing = thing.func
    module = sys.modules.get(getattr(thing, "__module__", ""))
    file = getattr(module, "__file__", None) or _file_of(thing)
    if file is None:
        return Source(Path(), {})
    home = Path(file).resolve()
    root = root_of(module, home)
    # Thousands of modules are loaded: most are told apart by how their path begins, without asking the system.
    beginnings = tuple({f"{root}{os.sep}", f"{root_of(module, Path(file))}{os.sep}"})
    found = {home}
    for loaded in list(sys.modules.values()):
        other = getattr(loaded, "__file__", None)
        if isinstance(other, str) and other.startswith(beginnings) and other.endswith(".py"):
            path = Path(other).resolve()
            if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
                found.add(path)
    return Source(root, {str(path.relative_to(root)): _digest(path) for path in sorted(found) if path.is_file()})


def root_of(module: Any, home: Path) -> Path:
    """The folder of the outermost package that a module belongs to, or just the folder that its file is in."""
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


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
