"""A traced step in a file, so that one machine traces and another compiles; and its shardings.

A zip archive of `step.json`, the arguments and results of the program, and `step.hlo`, the program as XLA's message. It
contains no Python code, and it is read with limits.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

FORMAT = 1
SUFFIX = ".step"
_FACTS, _PROGRAM = "step.json", "step.hlo"
_MOST_FACTS, _MOST_PROGRAM = 256 * 2**20, 2 * 2**30


@dataclass(frozen=True)
class Argument:
    kind: str  # weights, optimizer, gradients, batch or other
    name: str
    shape: list[int]  # of the whole
    dtype: str
    sharding: str
    result: int | None  # which result takes its place in memory


@dataclass(frozen=True)
class Traced:
    slice: str
    devices: int
    replicas: int  # programs that each device runs by itself (ddp), or 1: one program over all of them
    mesh: dict[str, int]
    batch: int
    programs: int  # of a step: micro-batches, each of which is one
    examples: int | None
    parameters: int
    weights_bytes: int
    optimizer_bytes: int
    precision: str
    arguments: list[Argument]
    results: list[str]  # the sharding of each
    seconds: float
    name: str
    versions: dict[str, str]

    def facts(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def write(traced: Traced, program: bytes, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(_FACTS, json.dumps(traced.facts()))
        out.writestr(_PROGRAM, program)


def read(file: Path) -> tuple[Traced, bytes]:
    try:
        with zipfile.ZipFile(file) as archive:
            facts = json.loads(_member(archive, _FACTS, _MOST_FACTS, file))
            program = _member(archive, _PROGRAM, _MOST_PROGRAM, file)
    except (OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: is no step that lockstep plan --trace has written: {error}") from None
    if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
        raise ConfigError(f"{file}: was written by another version of Lockstep: trace the step again")
    try:
        arguments = [Argument(**each) for each in facts.pop("arguments")]
        return Traced(arguments=arguments, **facts), program
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: is damaged, or no step: {error}") from None


def is_step(file: Path) -> bool:
    return file.suffix == SUFFIX


def _member(archive: zipfile.ZipFile, name: str, most: int, file: Path) -> bytes:
    size = archive.getinfo(name).file_size
    if size > most:
        raise ConfigError(f"{file}: {name} would be {size} bytes, more than the {most} that are read")
    with archive.open(name) as member:
        return member.read(most + 1)


REPLICATED = "{replicated}"

Entry = str | tuple[str, ...] | None


def words(spec: Sequence[Entry], mesh: Mapping[str, int]) -> str:
    """Returns XLA's sharding, such as `{devices=[8,1,2]<=[16] last_tile_dim_replicate}`: 8 parts, 2 copies of each.

    Devices are numbered along the mesh, its last axis first; `T(...)` is the order of its axes.
    """
    names = list(mesh)
    parts = [math.prod(mesh[axis] for axis in _axes(entry)) for entry in spec]
    read = [names.index(axis) for entry in spec for axis in _axes(entry)]
    if math.prod(parts) == 1:
        return REPLICATED
    left = [number for number in range(len(names)) if number not in read]
    copies = math.prod(mesh[names[number]] for number in left)
    tiles = [*parts, copies] if copies > 1 else parts
    order = [*read, *left]
    sizes = list(mesh.values())
    devices = math.prod(sizes)
    source = f"[{devices}]" if order == sorted(order) else f"[{_joined(sizes)}]T({_joined(order)})"
    return f"{{devices=[{_joined(tiles)}]<={source}{' last_tile_dim_replicate' if copies > 1 else ''}}}"


def part(shape: Sequence[int], sharding: str) -> list[int]:
    match = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if match is None:
        return list(shape)
    tiles = [int(each) for each in match[1].split(",")][: len(shape)]
    return [-(-size // by) for size, by in zip(shape, tiles, strict=True)]


def _axes(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
