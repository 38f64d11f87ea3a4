"""The batches of a stream: how ranks exchange their counts, and how a rank's examples become micro-batches.

A worker does not know what the other ranks have, so it prepares for all that may be asked of it: a micro-batch without
examples counts for nothing, and where shapes are fixed a short one comes with what takes its filler back.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import default_collate

from lockstep.data.batches import MicroBatch
from lockstep.data.loader import Collate
from lockstep.data.permutation import Indices
from lockstep.data.seeding import generators_kept, seed_by
from lockstep.data.stream_reader import OWN, PIECES, WHOLE, ReaderShards, is_stateful
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import ConfigError
from lockstep.runtime.moving import pinned, tensors_of

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

# What is read ahead of an exchange, at most.
_SECONDS = 0.2
_BYTES = 64 * 2**20
_TENSORS = 128  # each from a worker is an open file
_BATCHES = 32

Count = Callable[[Any], int]
_BATCH_SEEDS = 8  # random numbers for what is read: 1 to 7 are others'


def with_counts(
    group: Group, dp_rank: int, dp_size: int, name: str, read: Callable[[], tuple[Item, int]], ahead: bool = True
) -> Iterator[tuple[Item, list[int]]]:
    """Yields what `read` returns, with how many examples each dp rank has for that batch. Without end.

    `read` returns a batch and how many examples it has, 0 from the end on. An exchange costs milliseconds, so each rank
    reads some batches ahead and sends the counts of all of them at once; how many is agreed by the exchange before.
    """
    before = batches = 1
    last = time.monotonic()
    while True:
        items = [read() for _ in range(batches)]
        now = time.monotonic()
        more = _affordable((now - last) / before, items[0][0]) if ahead and group.world_size > 1 else 1
        last, before = now, batches
        message: list[Any] = [dp_rank, [count for _, count in items], min(more, 2 * batches)]
        answers = group.gather(message, f"how many examples of {name!r} every rank has")
        for index, (item, _) in enumerate(items):
            yield item, _by_dp_rank([(each[0], each[1][index]) for each in answers], dp_size, name)
        batches = min(each[2] for each in answers)


def _affordable(seconds: float, item: Any) -> int:
    """Returns how many batches can be read ahead, if each takes so long and is as large as this one."""
    sizes = [tensor.nbytes for _, tensor in tensors_of(item)]
    limits = _SECONDS / max(seconds, 1e-9), _BYTES / max(sum(sizes), 1), _TENSORS / max(len(sizes), 1), _BATCHES
    return max(1, int(min(limits)))


def _by_dp_rank(answers: Sequence[tuple[int, int]], dp_size: int, name: str) -> list[int]:
    """Returns the count of each dp rank, from what every rank says of its own."""
    counts: dict[int, int] = {}
    for rank, (dp_rank, count) in enumerate(answers):
        if counts.setdefault(dp_rank, count) != count:
            raise ConfigError(
                f"{name}: rank {rank} has {count} examples for a batch, and another rank that computes the same part "
                f"of it {counts[dp_rank]}: ranks with the same part must read the same, in the same order"
            )
    return [counts[dp_rank] for dp_rank in range(dp_size)]


@dataclass
class Chunk:
    """A rank's examples of one global batch."""

    reader: int
    count: int  # examples
    batches: list[Any]  # one for every micro-batch
    fillers: list[Any]  # for each of them what takes its filler back, where it has any
    place: Any  # where the reader is, once the batch is done
    digest: str | None = None  # of what was read, for the first batch of a pass

    def pin_memory(self) -> Chunk:
        self.batches, self.fillers = pinned(self.batches), pinned(self.fillers)
        return self


@dataclass(frozen=True)
class BatchSlice:
    """How a rank's examples of a global batch are divided into micro-batches."""

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
        """The number of examples that this rank takes of a global batch, from its own pieces."""
        return self.batch_size * (self.dp_rank + 1) // self.dp_size - self.batch_size * self.dp_rank // self.dp_size

    @property
    def micros(self) -> int:
        return max(1, min(self.accumulate, -(-self.batch_size // self.dp_size)))

    @property
    def full(self) -> int:
        return -(-self.batch_size // (self.dp_size * self.accumulate * self.multiple)) * self.multiple

    def mine(self, whole: Sequence[Any]) -> Sequence[Any]:
        """Returns this rank's examples of a global batch that all of them read: the same slice as of map-style data."""
        first, last = (len(whole) * dp_rank // self.dp_size for dp_rank in (self.dp_rank, self.dp_rank + 1))
        return whole[first:last]

    def piece_size(self, count: int, number: int) -> int:
        return count // self.micros + (number < count % self.micros)

    def batches(self, mine: Sequence[Any], spare: Any) -> tuple[list[Any], list[Any]]:
        """Returns micro-batches, and what takes their filler back; `spare` is an example for those without any."""
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
        """Returns what a rank without examples computes; of the usual size, where it has run out and others go on."""
        size = self.full if self.fill else -(-self.size // self.micros) if usual else 1
        return self._collated([example] * max(size, 1))

    def micro_batches(
        self, number: int, chunk: Chunk | None, counts: Sequence[int], ends_epoch: bool, spare: Any, place: Any
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yields this rank's micro-batches of a global batch, as many on all ranks; `counts` are those of the dp
        ranks."""
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
        """The number of readers of a rank: no more than it has pieces for."""
        wanted = max(self.workers, 1)
        return max(1, min(wanted, -(-len(self.order) // self.cut.dp_size))) if self.kind == PIECES else wanted

    def begin(self) -> list[ReaderShards]:
        return self._divided(self.order)

    def resume(self, saved: dict[str, Any]) -> list[ReaderShards]:
        """Returns the readers of this rank, for what all ranks had left; `saved` is what they had."""
        cut, places = self.cut, saved["places"]
        if self.kind == WHOLE:  # all readers of all ranks were at the same place
            return [ReaderShards.of(places[0][0]) for _ in range(self.readers)]
        if len(places) == cut.dp_size and len(places[cut.dp_rank]) == self.readers:
            return [ReaderShards.of(each) for each in places[cut.dp_rank]]
        if self.kind == OWN:
            raise ConfigError(
                f"{self.name}: it divides itself (is_share), and this pass was begun with {len(places)} ranks x "
                f"{len(places[0])} readers, so that {cut.dp_size} x {self.readers} cannot resume it: use as "
                "many as before, or a checkpoint at the end of an epoch. A stream with num_shards and "
                "shard(num_shards, index) can be divided anew"
            )
        return self._divided_anew([ReaderShards.of(each) for readers in places for each in readers])

    def check(self, resumes: bool) -> None:
        """Refuses a stream of which a rank would have nothing."""
        cut, pieces, readers = self.cut, len(self.order), self.cut.dp_size * max(self.workers, 1)
        if self.kind != WHOLE and cut.batch_size < cut.dp_size:
            raise ConfigError(
                f"batch_size: {cut.batch_size} examples of {self.name} cannot be shared by {cut.dp_size} ranks, each "
                f"of which takes them from a part of its own: set it to {cut.dp_size} or more"
            )
        if self.kind == PIECES and pieces < cut.dp_size and not resumes:
            raise ConfigError(
                f"{self.name}: {pieces} shards for {cut.dp_size} ranks leave {cut.dp_size - pieces} of them without "
                f"any: write the data into {readers} shards or more (ranks x workers), or train with {pieces} "
                "processes or fewer"
            )

    def who_reads(self) -> str:
        """Returns a line for the log."""
        name, ranks, workers, pieces = self.name, self.cut.dp_size, self.workers, len(self.order)
        who = f"{ranks} rank{'s' * (ranks > 1)}" + (f" x {workers} worker{'s' * (workers > 1)}" if workers else "")
        readers = ranks * max(workers, 1)
        if self.kind == OWN:
            return f"{name} divides itself (is_share): each reader of {who} trains on all that it yields there"
        if self.kind == WHOLE:
            if readers == 1:
                return f"{name}: {who} reads all of it"
            return (
                f"{name} has no shards to divide (num_shards, shard), or fewer than ranks: each of {readers} readers "
                f"({who}) reads all of it, and every rank keeps its part of each batch"
            )
        if pieces >= readers:
            return f"{name}: {pieces} shards, divided over {who}"
        return (
            f"{name}: {pieces} shards for {who}: workers without any are not started. Write the data into {readers} "
            f"shards or more, or set data.workers to {max(pieces // ranks, 1)}"
        )

    def _divided(self, order: list[int]) -> list[ReaderShards]:
        if self.kind != PIECES:
            return [ReaderShards([0], number=number) for number in range(self.readers)]
        mine = order[self.cut.dp_rank :: self.cut.dp_size]
        return [ReaderShards(mine[number :: self.readers], number=number) for number in range(self.readers)]

    def _divided_anew(self, readers: list[ReaderShards]) -> list[ReaderShards]:
        """Divides the remaining pieces; one that was begun is finished by one reader."""
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


def streamed(
    group: Group,
    batches: Iterable[Any],
    count: Count,
    name: str,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    start: int = 0,
    key: Sequence[int] | None = None,
) -> Generator[tuple[MicroBatch, Any], None, None]:
    """Yields this rank's micro-batch of every global batch from `start` on, until no rank has any examples left.

    With a `key`, batches are read ahead, with their own random numbers, so that it changes nothing for training, and
    the state of a stateful source is noted with each batch. Without, batches may depend on what was trained before.
    """
    dp_rank, dp_size = group.rank if dp_rank is None else dp_rank, group.world_size if dp_size is None else dp_size
    reading = _Ahead(batches, count, name, dp_rank, start, key)
    coming = with_counts(group, dp_rank, dp_size, name, reading.next, ahead=key is not None)
    spare: Any = None  # what a rank that has run out computes, to take part: it counts for nothing
    number, ((batch, place), counts) = start, next(coming)
    lacking = [each for each, examples in enumerate(counts) if examples == 0]
    if lacking and not start:
        raise ConfigError(
            f"{ranks_text(lacking)} of {len(counts)} got no examples of {name!r}: all ranks must have some. Split the "
            "source into more pieces (Ray Data: dataset.repartition), or use fewer workers"
        )
    while sum(counts):
        following = next(coming)
        mine, whole = counts[dp_rank], sum(counts)
        spare = batch if mine else spare if spare is not None else reading.again()
        weight, none = mine * dp_size / whole, np.empty(0, dtype=np.int64)
        yield (
            MicroBatch(number, 0, none, mine, weight, whole, True, not sum(following[1]), place),
            batch if mine else spare,
        )
        number, ((batch, place), counts) = number + 1, following


class _Ahead:
    def __init__(
        self, batches: Iterable[Any], count: Count, name: str, dp_rank: int, number: int, key: Sequence[int] | None
    ) -> None:
        self._source, self._count, self._name = batches, count, name
        self._dp_rank, self._key, self._number = dp_rank, key, number
        with self._random_numbers():
            self._batches: Iterator[Any] = iter(batches)

    def next(self) -> tuple[tuple[Any, Callable[[], Any] | None], int]:
        """Returns the next batch, where the source is once it is done, and how many examples it has."""
        with self._random_numbers():
            batch = next(self._batches, None)
        self._number += 1
        examples = 0 if batch is None else self._count(batch)
        place = None
        if self._key is not None and is_stateful(self._source):
            state = copy.deepcopy(self._source.state_dict())  # type: ignore[attr-defined]
            place = partial(copy.copy, state)
        return (batch, place), examples

    def again(self) -> Any:
        """Returns a batch for a rank that ran out before the run was resumed."""
        with self._random_numbers():
            found = next(iter(self._source), None)
        if found is None:
            raise ConfigError(
                f"{self._name!r}: this rank ran out of it, and it cannot be read again: its __iter__ must begin anew "
                "each time"
            )
        return found

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        if self._key is None:
            yield
            return
        with generators_kept():
            seed_by((_BATCH_SEEDS, *self._key, self._dp_rank, self._number))
            yield


def counted(batches: Iterator[Any], count: Count) -> Iterator[tuple[int, int, Any]]:
    """Yields batches with how many examples count, and how many there are: all of them."""
    return ((length := count(batch), length, batch) for batch in batches)
