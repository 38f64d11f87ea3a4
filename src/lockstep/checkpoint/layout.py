"""Where every tensor of a checkpoint by owners is, and which rank writes which block of it: pure functions of what the
ranks have told each other, so that all of them come to the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.checkpoint import ranges, tensor_file
from lockstep.checkpoint.manifest import shard_name
from lockstep.checkpoint.ranges import Range
from lockstep.checkpoint.tensor_file import Entry
from lockstep.errors import CheckpointError

MODEL, STATE = "model", "state"
_METADATA = {MODEL: {"format": "pt"}, STATE: {}}


class Item(NamedTuple):
    """A tensor of the model or of the rest of the state, as its file holds it."""

    kind: str
    entry: Entry
    spread: bool  # over ranks; else rank 0's is saved

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.entry.name}"

    def plain(self) -> list[Any]:
        """For a message to other ranks."""
        entry = self.entry
        return [
            self.kind, entry.name, tensor_file.code_of(entry.dtype), list(entry.shape), entry.pairs, self.spread,
        ]  # fmt: skip

    @classmethod
    def from_plain(cls, told: Sequence[Any]) -> Item:
        kind, name, code, shape, pairs, spread = told
        return cls(kind, Entry(name, tensor_file.dtype_of(code), tuple(shape), pairs=pairs), spread)


class Block(NamedTuple):
    """A part of a tensor, as its file holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class File:
    name: str
    header: bytes
    size: int
    items: list[Item]  # with their places, in the order of the file


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint, and for every tensor the blocks that make it up, by the rank that writes each."""

    files: list[File]
    blocks: dict[str, dict[int, Block]]

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.files)

    def written_by(self, rank: int, file: File) -> list[tuple[Item, list[Range]]]:
        """What a rank writes of a file, in the order of the file; without the header, which is rank 0's."""
        return [
            (item, ranges.of_block(item.entry.shape, *block, item.entry.dtype.itemsize, item.entry.begin))
            for item in file.items
            if (block := self.blocks[item.key].get(rank)) is not None
        ]

    def parts(self, world_size: int) -> dict[str, dict[str, list[Range]]]:
        """For every file and rank the bytes that this rank writes, as in parts.json."""
        found: dict[str, dict[str, list[Range]]] = {}
        for file in self.files:
            for rank in range(world_size):
                mine = [each for _, found_ranges in self.written_by(rank, file) for each in found_ranges]
                if rank == 0:
                    mine.insert(0, Range(0, len(file.header), len(file.header), 1))
                if mine:
                    found.setdefault(file.name, {})[str(rank)] = mine
        return found

    def index(self) -> dict[str, Any]:
        """Which file has which weight, as Hugging Face writes it."""
        models = [file for file in self.files if file.items[0].kind == MODEL]
        return {
            "metadata": {"total_size": sum(item.entry.nbytes for file in models for item in file.items)},
            "weight_map": {item.entry.name: file.name for file in models for item in file.items},
        }


def make(items: Sequence[Item], had: Sequence[Sequence[Block]]) -> Layout:
    """`had` are the blocks that each rank has of the tensors that are spread, in the order of `items`."""
    blocks: dict[str, dict[int, Block]] = {}
    spread = 0
    for number, item in enumerate(items):
        if not item.spread:
            blocks[item.key] = {0: Block((0,) * len(item.entry.shape), item.entry.shape)}
            continue
        blocks[item.key] = _writers(item.entry, [each[spread] for each in had], number)
        spread += 1
    files = [file for kind in (MODEL, STATE) for file in _files(kind, items, len(had))]
    return Layout(files, blocks)


def _writers(entry: Entry, had: Sequence[Block], number: int) -> dict[int, Block]:
    """Of the ranks that have the same block one writes it, for every tensor another one."""
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(had):
        if block.elements:
            holders.setdefault(block, []).append(rank)
    _check_complete(entry, list(holders))
    return {ranks[number % len(ranks)]: block for block, ranks in holders.items()}


def _check_complete(entry: Entry, blocks: Sequence[Block]) -> None:
    """Blocks make up a tensor where the intervals along each axis do, and every cell of that grid is there once."""
    along = [sorted({(each.offset[axis], each.size[axis]) for each in blocks}) for axis in range(len(entry.shape))]
    ends = [[0, *(begin + size for begin, size in intervals)] for intervals in along]
    even = all(
        [begin for begin, _ in intervals] == end[:-1] and end[-1] == length
        for intervals, end, length in zip(along, ends, entry.shape, strict=True)
    )
    if entry.nbytes and not (even and len(blocks) == math.prod(len(each) for each in along)):
        told = ", ".join(f"{list(each.size)} at {list(each.offset)}" for each in blocks[:8]) or "nothing"
        raise CheckpointError(
            f"{entry.name!r} of shape {list(entry.shape)} cannot be saved: what the ranks have of it does not make it "
            f"up, or overlaps ({told})"
        )


def _files(kind: str, items: Sequence[Item], most: int) -> list[File]:
    """Tensors in their order over at most so many files of about the same size."""
    chosen = [item for item in items if item.kind == kind]
    whole = sum(item.entry.nbytes for item in chosen)
    groups: dict[int, list[Item]] = {}
    before = itertools.accumulate((item.entry.nbytes for item in chosen), initial=0)
    for item, begin in zip(chosen, before, strict=False):
        middle = begin + item.entry.nbytes / 2
        groups.setdefault(min(int(middle / whole * most), most - 1) if whole else 0, []).append(item)
    files = []
    for number, group in enumerate(groups.values(), 1):
        header, entries = tensor_file.laid_out([item.entry for item in group], _METADATA[kind])
        spread = {item.entry.name: item.spread for item in group}
        placed = [Item(kind, entry, spread[entry.name]) for entry in entries]
        size = len(header) + sum(entry.nbytes for entry in entries)
        files.append(File(shard_name(kind, number, len(groups)), header, size, placed))
    return files
