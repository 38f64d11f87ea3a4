"""Plans the files of a sharded checkpoint, and which rank writes which block of each tensor.

Pure functions of what all ranks have exchanged, so that every rank gets the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.checkpoint import ranges
from lockstep.checkpoint.header import Entry, Piece, laid_out
from lockstep.checkpoint.manifest import shard_name
from lockstep.checkpoint.ranges import Range
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

    @property
    def tensor(self) -> str:
        """The key of the tensor that it is, or is a piece of."""
        return f"{self.kind}/{self.entry.tensor}"

    def plain(self) -> list[Any]:
        """For a message to other ranks."""
        name, dtype, itemsize, shape, _, pairs, _ = self.entry
        return [self.kind, name, dtype, itemsize, list(shape), pairs, self.spread]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Item:
        kind, name, dtype, itemsize, shape, pairs, spread = plain
        return cls(kind, Entry(name, dtype, itemsize, tuple(shape), pairs=pairs), spread)


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
    owner: int = 0  # the rank that makes it and writes its header
    shared: bool = True  # whether other ranks write to it, too


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint, and for every tensor the blocks that make it up, by the rank that writes each."""

    files: list[File]
    blocks: dict[str, dict[int, Block]]

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.files)

    def written_by(self, rank: int, file: File) -> list[tuple[Item, list[Range]]]:
        """What a rank writes of a file, in the order of the file, without the header."""
        return [
            (item, ranges.of_block(item.entry.shape, *block, item.entry.itemsize, item.entry.begin))
            for item in file.items
            if (block := self.blocks[item.key].get(rank)) is not None
        ]

    def ranges_of(self, rank: int, file: File) -> list[Range]:
        """The bytes of a file that a rank writes; its owner also writes the header."""
        header = [Range(0, len(file.header), len(file.header), 1)] if rank == file.owner else []
        return header + [each for _, places in self.written_by(rank, file) for each in places]

    def parts(self, world_size: int) -> dict[str, dict[str, list[Range]]]:
        """For every file and rank the bytes that this rank writes, as in parts.json."""
        return {
            file.name: {str(rank): mine for rank in range(world_size) if (mine := self.ranges_of(rank, file))}
            for file in self.files
        }

    def index(self) -> dict[str, Any]:
        """The file of every weight, as Hugging Face writes it."""
        models = [file for file in self.files if file.items[0].kind == MODEL]
        return {
            "metadata": {"total_size": sum(item.entry.nbytes for file in models for item in file.items)},
            "weight_map": {item.entry.name: file.name for file in models for item in file.items},
        }


def make(items: Sequence[Item], had: Sequence[Sequence[Block]], apart: bool = False) -> Layout:
    """Plans a checkpoint; `had` are the blocks that each rank has of the sharded tensors, in the order of `items`.

    Ranks of one host write into the same files. With `apart`, every rank writes its own file, with pieces of tensors:
    file systems do not promise that hosts may write to one file at the same time.
    """
    blocks: dict[str, dict[int, Block]] = {}
    spread = 0
    for number, item in enumerate(items):
        if not item.spread:
            blocks[item.key] = {0: Block((0,) * len(item.entry.shape), item.entry.shape)}
            continue
        blocks[item.key] = _writers(item.entry, [each[spread] for each in had], number)
        spread += 1
    if apart:
        return _apart(items, blocks, len(had))
    files = [file for kind in (MODEL, STATE) for file in _files(kind, items, len(had))]
    return Layout(files, blocks)


def _apart(items: Sequence[Item], blocks: Mapping[str, Mapping[int, Block]], ranks: int) -> Layout:
    files: list[File] = []
    pieces: dict[str, dict[int, Block]] = {}
    for kind in (MODEL, STATE):
        written: dict[int, list[Item]] = {}
        for item in (each for each in items if each.kind == kind):
            empty = {0: Block((0,) * len(item.entry.shape), item.entry.shape)}  # which nobody writes, but a file names
            for rank, block in (blocks[item.key] or empty).items():
                mine = _piece(item, block)
                pieces.setdefault(mine.key, {})[rank] = Block((0,) * len(block.size), block.size)
                written.setdefault(rank, []).append(mine)
        for number, rank in enumerate(sorted(written), 1):
            files.append(_file(kind, written[rank], number, len(written), owner=rank, shared=False))
    return Layout(files, pieces)


def _piece(item: Item, block: Block) -> Item:
    entry = item.entry
    if block.size == entry.shape:
        return item
    name = f"{entry.name}[{','.join(map(str, block.offset))}]"
    piece = Piece(entry.name, entry.shape, block.offset)
    return item._replace(entry=entry._replace(name=name, shape=block.size, piece=piece))


def _writers(entry: Entry, had: Sequence[Block], number: int) -> dict[int, Block]:
    """Chooses one of the ranks that have the same block to write it, another one for every tensor."""
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
        shown = ", ".join(f"{list(each.size)} at {list(each.offset)}" for each in blocks[:8]) or "nothing"
        raise CheckpointError(
            f"{entry.name!r} of shape {list(entry.shape)} cannot be saved: what the ranks have of it does not make it "
            f"up, or overlaps ({shown})"
        )


def _files(kind: str, items: Sequence[Item], most: int) -> list[File]:
    """Divides tensors, in their order, over at most so many files of about the same size."""
    chosen = [item for item in items if item.kind == kind]
    whole = sum(item.entry.nbytes for item in chosen)
    groups: dict[int, list[Item]] = {}
    before = itertools.accumulate((item.entry.nbytes for item in chosen), initial=0)
    for item, begin in zip(chosen, before, strict=False):
        middle = begin + item.entry.nbytes / 2
        groups.setdefault(min(int(middle / whole * most), most - 1) if whole else 0, []).append(item)
    return [_file(kind, group, number, len(groups)) for number, group in enumerate(groups.values(), 1)]


def _file(kind: str, items: Sequence[Item], number: int, count: int, owner: int = 0, shared: bool = True) -> File:
    header, entries = laid_out([item.entry for item in items], _METADATA[kind])
    spread = {item.entry.name: item.spread for item in items}
    placed = [Item(kind, entry, spread[entry.name]) for entry in entries]
    size = len(header) + sum(entry.nbytes for entry in entries)
    return File(shard_name(kind, number, count), header, size, placed, owner, shared)
