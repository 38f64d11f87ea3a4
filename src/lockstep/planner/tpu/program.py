"""Parses a compiled XLA program: its collectives, and what is in memory when.

The text has one instruction per line, in the order of execution:

    %fusion.7 = bf16[8,2048]{1,0:T(8,128)(2,1)} fusion(%p.1, %p.2), kind=kOutput, metadata={... source_line=12}

`T(8,128)` are the tiles of the layout; `S(1)` is on-chip memory, which is not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "f8e4m3fn": 8, "f8e5m2": 8}  # fmt: skip
_LINE = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"T\((\d+(?:,\d+)*)\)")
_OPERATION = re.compile(r" (?P<name>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_SAME_MEMORY = {"bitcast", "get-tuple-element", "tuple", "copy-done", "optimization-barrier"}
_GROUPS = re.compile(r"replica_groups=(?P<groups>\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>\{.*?\})\}")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)"(?: source_line=(?P<line>\d+))?')
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_BACKWARD = re.compile(r'op_name="[^"]*(?<!norm)_backward')
_LARGEST, _POINTS = 10, 400


@dataclass(frozen=True)
class Array:
    type: str
    dims: tuple[int, ...]
    bytes: int
    on_chip: bool


@dataclass
class Instruction:
    name: str
    operation: str
    arrays: list[Array]  # that it makes
    operands: list[str]
    text: str
    is_root: bool

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.arrays if not each.on_chip)


@dataclass(frozen=True)
class _Life:
    """A result, from its instruction to the last that reads it."""

    made: Instruction
    born: int
    end: int
    middle: int  # where the backward pass begins
    weights: set[tuple[int, ...]]  # the forms of the weights, and of a device's parts of them

    @property
    def kind(self) -> str:
        """Activations cross from the forward to the backward pass; gradients have the shape of a weight."""
        if self.born < self.middle:
            return "activations" if self.end >= self.middle else "temporaries"
        return "gradients" if any(each.dims in self.weights for each in self.made.arrays) else "temporaries"


class Program:
    def __init__(self, text: str) -> None:
        self._exchanges: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self.entry: list[Instruction] = []
        # The header has `input_output_alias={ {0}: (3, {}, may-alias), ... }`: result 0 takes argument 3's place.
        self._aliased = {int(each) for each in re.findall(r"\{(\d+)\}: \(", text[: text.find("\n")])}
        within, entered = "", False
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
                entered = line.startswith("ENTRY")
                within = line.split()[1 if entered else 0]
            elif line.startswith(" "):
                self._read(line, within, entered)

    def _read(self, line: str, within: str, entered: bool) -> None:
        exchanges = any(f" {name}" in line for name in _EXCHANGES)
        if not entered and not exchanges:
            return
        found = parsed(line)
        if found is None:
            return
        if entered:
            self.entry.append(found)
        if exchanges:
            self._note_exchange(found, within)

    def _note_exchange(self, found: Instruction, within: str) -> None:
        name = found.operation.removesuffix("-start")
        if name not in _EXCHANGES:
            return
        group = group_of(found.text)
        size = sum(each.bytes for each in found.arrays)
        if name == "reduce-scatter":
            size *= max(len(group), 1)
        elif name == "all-reduce" and "all-reduce-scatter" in within:
            name = "reduce-scatter"
        self._exchanges[(name, tuple(group), size)] += 1

    def plain(self, kinds: Sequence[str], whole: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
        """`kinds` are those of the arguments, `whole` the shapes of the weights."""
        arguments: Counter[str] = Counter()
        weights = {tuple(each) for each in whole}
        for each in self.entry:
            if each.operation == "parameter":
                number = int(re.search(r"parameter\((\d+)\)", each.text)[1])  # type: ignore[index]
                kind = kinds[number] if number < len(kinds) else "other"
                arguments[kind] += each.bytes
                if kind == "weights":
                    weights.update(one.dims for one in each.arrays)
        return {
            "by_argument": dict(arguments),
            "exchanges": [
                {"name": name, "group": list(group), "bytes": size, "count": count}
                for (name, group, size), count in self._exchanges.items()
            ],
            **self._memory(weights),
        }

    def _memory(self, weights: set[tuple[int, ...]]) -> dict[str, Any]:
        """Returns the bytes by kind over the run, and the largest results at the peak."""
        base = self._bases()
        ends: dict[str, int] = {}
        for number, each in enumerate(self.entry):
            for operand in each.operands:
                for name in base.get(operand, ()):
                    ends[name] = number
        middle = self._middle()
        lives = [
            _Life(each, number, max(ends.get(each.name, number), number), middle, weights)
            for number, each in enumerate(self.entry)
            if base.get(each.name) == (each.name,) and each.bytes
        ]
        changes: list[dict[str, int]] = [{} for _ in range(len(self.entry) + 1)]
        for life in lives:
            size = life.made.bytes
            changes[life.born][life.kind] = changes[life.born].get(life.kind, 0) + size
            changes[life.end + 1][life.kind] = changes[life.end + 1].get(life.kind, 0) - size
        now: dict[str, int] = {}
        held = []
        for change in changes[:-1]:
            now = {kind: now.get(kind, 0) + change.get(kind, 0) for kind in {*now, *change}}
            held.append(now)
        if not held:
            return {"timeline": [], "phases": [], "peak": {}, "phase": "program", "largest": []}
        peak = max(range(len(held)), key=lambda number: sum(held[number].values()))
        alive = sorted((each for each in lives if each.born <= peak <= each.end), key=lambda each: -each.made.bytes)
        step = max(len(held) // _POINTS, 1)
        parts = [held[at : at + step] for at in range(0, len(held), step)]
        begins = [("forward", 0)] + ([("backward", middle // step)] if middle < len(self.entry) else [])
        return {
            "timeline": [max(part, key=lambda each: sum(each.values())) for part in parts],
            "phases": begins,
            "peak": held[peak],
            "phase": "forward" if peak < middle else "backward",
            "largest": [_told(each) for each in alive[:_LARGEST]],
        }

    def _middle(self) -> int:
        """Returns where the backward pass begins: at its first operation, but for a few that can be computed early.

        The compiler moves shared parts of norms into the forward pass under the name of the backward pass.
        """
        found = [number for number, each in enumerate(self.entry) if _BACKWARD.search(each.text)]
        return found[len(found) // 20] if found else len(self.entry)

    def _bases(self) -> dict[str, tuple[str, ...]]:
        """Returns, for every instruction, those whose memory its result uses; none for an aliased argument."""
        found: dict[str, tuple[str, ...]] = {}
        for each in self.entry:
            if each.operation in ("parameter", "constant"):
                found[each.name] = ()
            elif each.operation in _SAME_MEMORY or each.operation.endswith("-done"):
                found[each.name] = tuple(name for operand in each.operands for name in found.get(operand, ()))
            else:
                found[each.name] = (each.name,)
        root = next((each for each in reversed(self.entry) if each.is_root), None)
        if root is not None and root.operation == "tuple":
            for number, operand in enumerate(root.operands):
                if number in self._aliased:
                    for name in found.get(operand, ()):
                        found[name] = ()
        return found


def parsed(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    rest = match["rest"]
    shape, rest = _split_shape(rest)
    operation = _OPERATION.match(rest)
    if operation is None:
        return None
    inside = rest[operation.end() :]
    operands = _OPERAND.findall(inside[: _closing(inside)])
    arrays = [_array(each) for each in _ARRAY.finditer(_made(shape, operation["name"]))]
    return Instruction(match["name"], operation["name"], arrays, operands, line, bool(match["root"]))


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


def _array(match: re.Match[str]) -> Array:
    dims = tuple(_numbers(match["dims"]))
    layout = match["layout"] or ""
    return Array(match["type"], dims, padded_bytes(match["type"], dims, layout), "S(" in layout)


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


def _told(life: _Life) -> dict[str, Any]:
    each = life.made
    widest = max((one for one in each.arrays if not one.on_chip), key=lambda one: one.bytes)
    source, name = _SOURCE.search(each.text), _OP_NAME.search(each.text)
    line = f"{source['file']}:{source['line']}" if source and source["line"] else source["file"] if source else ""
    return {
        "bytes": each.bytes,
        "kind": life.kind,
        "shape": list(widest.dims),
        "dtype": widest.type,
        "operation": name["name"] if name else each.operation,
        "line": line,
    }
