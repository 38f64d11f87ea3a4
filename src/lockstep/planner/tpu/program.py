"""Parses a compiled XLA program: its collectives, and how large its arguments are.

The text has one instruction per line:

    %fusion.7 = bf16[8,2048]{1,0:T(8,128)(2,1)} fusion(%p.1, %p.2), kind=kOutput, metadata={...}

`T(8,128)` are the tiles of the layout.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "f8e4m3fn": 8, "f8e5m2": 8}  # fmt: skip
_LINE = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<rest>.*)$")
_ARGUMENT = re.compile(r" parameter\((\d+)\)")
_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"T\((\d+(?:,\d+)*)\)")
_OPERATION = re.compile(r" (?P<name>[a-z][\w\-]*)\(")
_EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_GROUPS = re.compile(r"replica_groups=(?P<groups>\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>\{.*?\})\}")


def parsed(text: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the bytes of the arguments by kind, and the collectives; `kinds` are those of the arguments."""
    arguments: Counter[str] = Counter()
    exchanges: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    within, entered = "", False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            entered = line.startswith("ENTRY")
            within = line.split()[1 if entered else 0]
        elif entered and (match := _ARGUMENT.search(line)) is not None:
            number = int(match[1])
            arguments[kinds[number] if number < len(kinds) else "other"] += _instruction(line)[1]
        elif any(f" {name}" in line for name in _EXCHANGES):
            operation, size = _instruction(line)
            name, group = operation.removesuffix("-start"), group_of(line)
            if name == "reduce-scatter":
                size *= max(len(group), 1)
            elif name == "all-reduce" and "all-reduce-scatter" in within:
                name = "reduce-scatter"
            if name in _EXCHANGES:
                exchanges[(name, tuple(group), size)] += 1
    return {
        "by_argument": dict(arguments),
        "exchanges": [
            {"name": name, "group": list(group), "bytes": size, "count": count}
            for (name, group, size), count in exchanges.items()
        ],
    }


def _instruction(line: str) -> tuple[str, int]:
    """Returns the operation of a line, and the bytes of what it makes."""
    match = _LINE.match(line)
    shape, rest = _split_shape(match["rest"]) if match is not None else ("", "")
    operation = _OPERATION.match(rest)
    if operation is None:
        return "", 0
    arrays = _ARRAY.finditer(_made(shape, operation["name"]))
    return operation["name"], sum(
        padded_bytes(each["type"], _numbers(each["dims"]), each["layout"] or "") for each in arrays
    )


def _made(shape: str, operation: str) -> str:
    """The result of an asynchronous start includes its operands: (from, to, ...)."""
    if not operation.endswith("-start") or operation == "all-reduce-start" or not shape.startswith("("):
        return shape
    parts = _parts(shape[1:-1])
    return parts[0] if operation == "copy-start" else parts[1] if len(parts) > 1 else shape


def _parts(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    found, depth, begin = [], 0, 0
    for number, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[begin:number])
            begin = number + 1
    return [*found, text[begin:]]


def _split_shape(rest: str) -> tuple[str, str]:
    """A shape may be a tuple of shapes, with parentheses in their layouts."""
    if not rest.startswith("("):
        shape, space, after = rest.partition(" ")
        return shape, space + after
    end = _closing(rest[1:]) + 2
    return rest[:end], rest[end:]


def _closing(text: str) -> int:
    """Returns where the open parenthesis ends."""
    depth = 1
    for number, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return number
    return len(text)


def padded_bytes(type: str, dims: Sequence[int], layout: str = "") -> int:
    """Includes the padding of tiles: T(8,128) rounds the last two dimensions of the layout up."""
    order = [int(each) for each in layout.partition(":")[0].split(",") if each.strip().isdigit()]
    major = [dims[number] for number in reversed(order)] if len(order) == len(dims) else list(dims)
    if tiles := _TILE.findall(layout):
        tile = _numbers(tiles[0])
        major = [1] * (len(tile) - len(major)) + major
        for back in range(1, len(tile) + 1):
            major[-back] = -(-major[-back] // tile[-back]) * tile[-back]
    return math.prod(major) * _BITS.get(type, 32) // 8


def group_of(text: str) -> list[int]:
    """Returns the devices of the first group, from {{0,1},{2,3}} or [2,2]<=[4]T(1,0)."""
    match = _GROUPS.search(text)
    if match is None:
        pairs = _PAIRS.search(text)
        return _chain(pairs["pairs"]) if pairs else []
    groups = match["groups"]
    if groups.startswith("{"):
        return _numbers(groups[2:].partition("}")[0])
    shape, sizes, order = _IOTA.fullmatch(groups).groups()  # type: ignore[union-attr]
    numbers = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    if order:
        numbers = numbers.transpose(_numbers(order))
    return [int(each) for each in numbers.ravel()[: _numbers(shape)[-1]]]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _chain(pairs: str) -> list[int]:
    """Returns the devices that device 0 reaches."""
    sends = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    found, at = [0], sends.get(0)
    while at is not None and at not in found:
        found.append(at)
        at = sends.get(at)
    return sorted(found)
