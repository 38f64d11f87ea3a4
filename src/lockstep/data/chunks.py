"""What one rank has of a global batch of a stream, put into micro-batches.

A worker does not know what the other ranks have, so it prepares for all that may be asked of it: a micro-batch without
examples is one that counts for nothing, and where shapes are fixed a short one comes with what takes its filler back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from lockstep.data.loader import Collate
from lockstep.data.order import MicroBatch
from lockstep.data.permutation import Indices
from lockstep.data.sources import OWN, PIECES, WHOLE
from lockstep.data.stream_reader import ReaderShards
from lockstep.errors import ConfigError
from lockstep.runtime.moving import pinned


@dataclass
class Chunk:
    """A rank's examples of one global batch."""

    reader: int
    count: int  # examples
    batches: list[Any]  # one for every micro-batch
    fillers: list[Any]  # for each of them what takes its filler back, where it has any
    place: Any  # where the lane is, once the batch is done
    digest: str | None = None  # of what was read, for the first batch of a pass

    def pin_memory(self) -> Chunk:
        self.batches, self.fillers = pinned(self.batches), pinned(self.fillers)
        return self


@dataclass(frozen=True)
class BatchSlice:
    """How examples of a rank are cut into micro-batches."""

    dp_rank: int
    dp_size: int
    batch_size: int  # of the global batch
    accumulate: int = 1
    drop_last: bool = False
    fill: bool = False  # give every micro-batch the same number of examples
    multiple: int = 1
    collate: Collate | None = None

    @property
    def size(self) -> int:
        """Examples that this rank takes of a global batch, of pieces of its own."""
        return self.batch_size * (self.dp_rank + 1) // self.dp_size - self.batch_size * self.dp_rank // self.dp_size

    @property
    def micros(self) -> int:
        return max(1, min(self.accumulate, -(-self.batch_size // self.dp_size)))

    @property
    def full(self) -> int:
        return -(-self.batch_size // (self.dp_size * self.accumulate * self.multiple)) * self.multiple

    def mine(self, whole: Sequence[Any]) -> Sequence[Any]:
        """This rank's examples of a global batch that all of them read: the same slice as of map-style data."""
        first, last = (len(whole) * dp_rank // self.dp_size for dp_rank in (self.dp_rank, self.dp_rank + 1))
        return whole[first:last]

    def piece_size(self, count: int, number: int) -> int:
        return count // self.micros + (number < count % self.micros)

    def batches(self, mine: Sequence[Any], spare: Any) -> tuple[list[Any], list[Any]]:
        """Micro-batches, and what takes their filler back; `spare` is an example to compute where there is none."""
        batches, fillers, first = [], [], 0
        for number in range(self.micros):
            piece = list(mine[first : first + self.piece_size(len(mine), number)])
            first += len(piece)
            short = self.fill and 0 < len(piece) < self.full
            last = piece[-1] if piece else spare
            missing = self.full - len(piece) if self.fill else int(not piece)
            batches.append(self._collated(piece + [last] * missing))
            fillers.append(self._collated([last] * self.full) if short else None)
        return batches, fillers

    def spare(self, example: Any, usual: bool) -> Any:
        """What a rank without examples computes; of the usual size, where it has run out and others go on."""
        size = self.full if self.fill else -(-self.size // self.micros) if usual else 1
        return self._collated([example] * max(size, 1))

    def micro_batches(
        self, number: int, chunk: Chunk | None, counts: Sequence[int], ends_epoch: bool, spare: Any, place: Any
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """This rank's micro-batches of a global batch of which shares have so many examples: as many on all ranks."""
        whole, mine = sum(counts), counts[self.dp_rank]
        parts: list[tuple[Any, int, Indices]] = []  # the batch, how many examples it counts for, and their numbers
        first = number * self.batch_size + self.batch_size * self.dp_rank // self.dp_size
        for piece in range(min(self.micros, max(counts))):
            there = chunk is not None and piece < len(chunk.batches)
            batch = chunk.batches[piece] if chunk is not None and there else spare()
            size = self.piece_size(mine, piece)
            length = self.full if self.fill else max(size, 1)
            numbers = first + np.minimum(np.arange(length), max(size - 1, 0))  # its last example fills a batch up
            first += size
            if not self.fill:
                parts.append((batch, size, numbers))
                continue
            parts.append((batch, self.full if size else 0, numbers))
            if any(0 < self.piece_size(count, piece) < self.full for count in counts):
                short = chunk is not None and there and 0 < size < self.full
                filler = chunk.fillers[piece] if chunk is not None and short else batch
                parts.append((filler, size - self.full if short else 0, numbers))
        for index, (batch, examples, numbers) in enumerate(parts):
            last = index == len(parts) - 1
            weight = examples * self.dp_size / whole
            yield (
                MicroBatch(number, index, numbers, examples, weight, whole, last, last and ends_epoch, place),
                batch,
            )

    def _collated(self, examples: list[Any]) -> Any:
        return (self.collate or default_collate)(examples)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardAssignment:
    """How a stream is divided among ranks, and each rank's part among its workers."""

    name: str  # of the stream
    kind: str
    order: list[int]  # of the pieces, in this pass
    cut: BatchSlice
    workers: int

    @property
    def readers(self) -> int:
        """How many readers a rank has: no more than it has pieces for."""
        wanted = max(self.workers, 1)
        return max(1, min(wanted, -(-len(self.order) // self.cut.dp_size))) if self.kind == PIECES else wanted

    def begin(self) -> list[ReaderShards]:
        return self._divided(self.order)

    def resume(self, saved: dict[str, Any]) -> list[ReaderShards]:
        """The lanes of this rank, of what all ranks had left; `saved` is what they had."""
        cut, places = self.cut, saved["places"]
        if self.kind == WHOLE:  # all lanes of all ranks were at the same place
            return [ReaderShards.of(places[0][0]) for _ in range(self.readers)]
        if len(places) == cut.dp_size and len(places[cut.dp_rank]) == self.readers:
            return [ReaderShards.of(each) for each in places[cut.dp_rank]]
        if self.kind == OWN:
            raise ConfigError(
                f"{self.name}: it divides itself (is_share), and this pass was begun with {len(places)} ranks x "
                f"{len(places[0])} readers, so that {cut.dp_size} x {self.readers} cannot go on with it: go on "
                f"with as "
                "many as before, or from a checkpoint at the end of an epoch. A stream with num_shards and "
                "shard(num_shards, index) can be divided anew"
            )
        return self._divided_anew([ReaderShards.of(each) for of_rank in places for each in of_rank])

    def check(self, resumes: bool) -> None:
        """Refuse a stream of which a rank would have nothing; say where dividing it costs something."""
        cut, pieces, readers = self.cut, len(self.order), self.cut.dp_size * max(self.workers, 1)
        if self.kind != WHOLE and cut.batch_size < cut.dp_size:
            raise ConfigError(
                f"batch_size: {cut.batch_size} examples of {self.name} cannot be shared by {cut.dp_size} ranks, "
                f"each of "
                f"which takes them from a part of its own: set it to {cut.dp_size} or more"
            )
        if resumes:
            return
        if self.kind == PIECES and pieces < cut.dp_size:
            raise ConfigError(
                f"{self.name}: {pieces} shards for {cut.dp_size} ranks leave {cut.dp_size - pieces} of them "
                f"without any: "
                f"write the data into {readers} shards or more (ranks x workers), or train with {pieces} processes or "
                "fewer"
            )
        if self.kind == PIECES and pieces < readers:
            logger.info(
                "%s: %d shards for %d ranks x %d workers: workers without any are not started. Write the data into %d "
                "shards or more, or set data.workers to %d",
                self.name, pieces, cut.dp_size, self.workers, readers, pieces // cut.dp_size,
            )  # fmt: skip
        if self.kind == WHOLE and readers > 1:
            logger.info(
                "%s has no shards to divide (num_shards, shard), or fewer than ranks: each of %d readers (ranks x "
                "workers) reads all of it, and every rank keeps its part of each batch", self.name, readers,
            )  # fmt: skip

    def _divided(self, order: list[int]) -> list[ReaderShards]:
        if self.kind != PIECES:
            return [ReaderShards([0], number=number) for number in range(self.readers)]
        mine = order[self.cut.dp_rank :: self.cut.dp_size]
        return [ReaderShards(mine[number :: self.readers], number=number) for number in range(self.readers)]

    def _divided_anew(self, readers: list[ReaderShards]) -> list[ReaderShards]:
        """Every remaining piece once: one that was begun is finished by one reader."""
        marks = {piece: mark for reader in readers for piece, mark in reader.marks.items()}
        left = {piece for reader in readers for piece in reader.pieces}
        remaining = [piece for piece in self.order if piece in left]
        remaining.sort(key=lambda piece: piece not in marks)
        logger.info(
            "%s: %d of %d shards are left, %d of them begun; they are divided anew among %d ranks x %d readers",
            self.name, len(remaining), len(self.order), len(marks), self.cut.dp_size, self.readers,
        )  # fmt: skip
        divided = self._divided(remaining)
        for reader in divided:
            reader.marks = {piece: marks[piece] for piece in reader.pieces if piece in marks}
        return divided
