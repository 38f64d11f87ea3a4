"""How a tensor lies on a mesh, in the words that XLA has for it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

REPLICATED = "{replicated}"

Entry = str | tuple[str, ...] | None


def words(spec: Sequence[Entry], mesh: Mapping[str, int]) -> str:
    """`{devices=[8,1,2]<=[16] last_tile_dim_replicate}`: split in 8 along the first dimension, by 2 devices each.

    Devices are numbered along the mesh, its last axis first; `T(...)` says in which order its axes are read.
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
