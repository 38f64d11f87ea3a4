"""Reads a stream on all ranks in step: here or by workers. docs/decisions/025-streams.md

Every rank has readers, one for each of its workers, and takes a batch of one after the other. Ranks need not have
equally many examples: before a batch is handed out all ranks exchange how many they have for it (with_counts), at least
one batch ahead so that the last is known as such.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from lockstep.data import workers
from lockstep.data.batches import MicroBatch
from lockstep.data.loader import Collate
from lockstep.data.seeding import generators_kept
from lockstep.data.stream_batches import BatchSlice, Chunk, ShardAssignment, with_counts
from lockstep.data.stream_reader import OWN, PIECES, WHOLE, ReaderShards, Reading, Source, StreamReader, piece_order
from lockstep.data.workers import Loading
from lockstep.distributed.from_worker import FromWorker
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import ConfigError
from lockstep.runtime.moving import tensors_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Readers(IterableDataset[Any]):
    """The readers of one rank, and all that a worker needs to know to run one of them."""

    kind: str
    reading: Reading
    readers: list[ReaderShards]
    cut: BatchSlice
    start: int

    def __iter__(self) -> Iterator[Chunk | FromWorker]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        # What is divided here must not divide itself once more by the worker that it is in: it finds itself in none, as
        # without workers (in one of one, a Hugging Face dataset shuffles otherwise). What divides itself must find
        # itself in the same worker as before it was interrupted.
        number, count, data = self.readers[info.id].number, len(self.readers), self.reading.source.data
        same = torch_worker.WorkerInfo(id=number, num_workers=count, seed=info.seed, dataset=data)
        torch_worker._worker_info = same if self.kind == OWN else None
        try:
            yield from self.read(info.id)
        except Exception as error:
            yield FromWorker.of(error)

    def read(self, number: int) -> Generator[Chunk, None, None]:
        cut, shards, batch = self.cut, self.readers[number], self.start
        own = (cut.dp_rank, shards.number) if self.kind == OWN else ()
        size = cut.batch_size if self.kind == WHOLE else max(cut.size, 1)
        reader, digest = StreamReader(replace(self.reading, own=own), shards), True
        try:
            while taken := reader.take(size):
                if len(taken) < size and cut.drop_last:
                    return
                # All read all of what cannot be divided: workers take turns with its batches.
                if self.kind != WHOLE or (batch - self.start) % len(self.readers) == number:
                    mine = cut.mine(taken) if self.kind == WHOLE else taken
                    # The usual collate draws nothing.
                    with generators_kept() if cut.collate is not None else contextlib.nullcontext():
                        if cut.collate is not None:
                            reader.seed_for_collating(cut.dp_rank)
                        batches, fillers = self._collated(mine, taken[0], reader)
                    first = _digest(taken) if digest else None
                    digest = False
                    yield Chunk(number, len(mine), batches, fillers, reader.place(), first)
                batch += 1
        finally:
            reader.close()

    def _collated(self, mine: Sequence[Any], spare: Any, reader: StreamReader) -> tuple[list[Any], list[Any]]:
        try:
            return self.cut.batches(mine, spare)
        except Exception as error:
            error.add_note(f"collating {len(mine)} of {reader.first(reader.position)}")
            raise


class Pass:
    """One pass of one rank over a stream, from its beginning or from where it was left."""

    def __init__(
        self,
        source: Source,
        cut: BatchSlice,
        loading: Loading,
        *,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
        shuffle: bool = False,
        buffer: int | None = None,
        saved: dict[str, Any] | None = None,
        evaluates: bool = False,
        name: str = "",
    ) -> None:
        """`start` is the global batch to begin with, and `saved` where all ranks were then. `shuffle` is for the order
        of pieces; a `buffer` shuffles the examples of each in blocks of so many. Passes of another `name` draw other
        random numbers."""
        self._source, self._cut, self._loading, self._start, self._epoch = source, cut, loading, start, epoch
        self.kind = saved["kind"] if saved else source.kind(cut.dp_size)
        pieces = (source.pieces or 1) if self.kind == PIECES else 1
        self._order = piece_order(pieces, seed, epoch, shuffle)
        division = ShardAssignment(source.name, self.kind, self._order, cut, loading.workers)
        if not evaluates:
            division.check(resumes=saved is not None)
        self.who_reads = division.who_reads()
        readers = division.resume(saved) if saved else division.begin()
        chunk = buffer or (cut.batch_size if self.kind == WHOLE else max(cut.size, 1))
        reading = Reading(source, pieces, chunk, buffer is not None, seed, epoch, set_epoch=not evaluates, walk=name)
        self._readers = Readers(self.kind, reading, readers, cut, start)
        self._places = [(0, reader.marks.get(reader.pieces[0]) if reader.pieces else None) for reader in readers]
        self._loader: DataLoader[Any] | None = None
        self.closed, self._evaluates = False, evaluates
        self._digest: str | None = None
        if discarded := max(reader.to_discard for reader in readers):
            logger.info(
                "%s has no state to resume from (state_dict and load_state_dict): %d examples that are done already "
                "are read again and discarded", source.name, discarded,
            )  # fmt: skip

    def micro_batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yields this rank's part of every global batch, for a rank that need not wait for others."""
        counts = [0] * self._cut.dp_size
        for number, chunk in enumerate(self._chunks()):
            self._digest = self._digest or chunk.digest
            counts[self._cut.dp_rank] = chunk.count
            if chunk.count:
                yield from self._cut.micro_batches(number, chunk, counts, False, lambda: self._spare, None)

    def compare(self, group: Group) -> None:
        """After `micro_batches` on all ranks: checks that those that read all of a stream read the same."""
        if self.kind == WHOLE:
            self._compare(group.gather(self._digest, f"the first examples of {self._source.name!r}"))

    def in_step(self, group: Group) -> Generator[tuple[MicroBatch, Any], None, None]:
        """Yields this rank's part of every global batch, until no rank has any examples left."""
        chunks, number, cut = self._chunks(), self._start, self._cut

        def read() -> tuple[Chunk | None, int]:
            chunk = next(chunks, None)
            return chunk, chunk.count if chunk else 0

        try:
            batches = with_counts(group, cut.dp_rank, cut.dp_size, self._source.name, read)
            chunk, counts = next(batches)
            self._compare(group.gather(chunk.digest if chunk else None, f"what {self._source.name!r} begins with"))
            self._require_examples(counts)
            while sum(counts):
                place = self._place_after(chunk)
                following, coming = next(batches)
                yield from self._cut.micro_batches(number, chunk, counts, not sum(coming), lambda: self._spare, place)
                number, chunk, counts = number + 1, following, coming
        finally:
            chunks.close()

    def first(self) -> tuple[MicroBatch, Any]:
        length = self._cut.full if self._cut.fill else 1
        micro = MicroBatch(0, 0, np.arange(length), length, 1.0, length, True, False)
        return micro, self._cut.spare(self._first_example, usual=False)

    def close(self, at_once: bool = False) -> None:
        self.closed = True
        loader, self._loader = self._loader, None
        if loader is not None:
            workers.end(loader, at_once)

    # Reading

    def _chunks(self) -> Generator[Chunk, None, None]:
        try:
            if self._loading.workers:
                self._loader = workers.loader(self._readers, self._loading, count=len(self._readers.readers))
                yield from workers.fetched(self._loader, self._source.name)
                return
            pin = self._loading.pin_memory and torch.cuda.is_available()
            with contextlib.closing(self._readers.read(0)) as chunks:
                for chunk in chunks:
                    yield chunk.pin_memory() if pin else chunk
        finally:
            self.close()

    @cached_property
    def _first_example(self) -> Any:
        """The first example of this rank's pieces, or of another's where it has none."""
        dp_rank = self._cut.dp_rank % len(self._order)
        for piece in self._order[dp_rank:] + self._order[:dp_rank]:
            reader = StreamReader(self._readers.reading, ReaderShards([piece]))
            found = reader.take(1)
            reader.close()
            if found:
                return found[0]
        raise self._empty()

    @cached_property
    def _spare(self) -> Any:
        """What a rank computes that has run out while others have not: it counts for nothing.

        It is read anew, so that it is the same for a rank that ran out before the run was interrupted.
        """
        return self._cut.spare(self._first_example, usual=True)

    # In step

    def _compare(self, digests: Sequence[str | None]) -> None:
        """Refuses ranks that read all of a stream and differ; warns of ranks that divide it and do not."""
        name, known = self._source.name, {each for each in digests if each is not None}
        if self.kind == WHOLE and len(known) > 1:
            other = next(rank for rank, each in enumerate(digests) if each != digests[0])
            raise ConfigError(
                f"{name}: every rank reads all of it and keeps its part, but the first batch of rank {other} is not "
                "that of rank 0. If it is divided by rank already (torch.distributed, split_by_node), say so with an "
                "attribute `is_share = True`; if it shuffles by itself, let every rank shuffle alike"
            )
        if self.kind == OWN and len(known) < self._cut.dp_size and not self._start:
            logger.warning(
                "%s says that it divides itself by rank (is_share), but some ranks begin with the same examples: these "
                "may be trained on several times", name,
            )  # fmt: skip

    def _place_after(self, chunk: Chunk | None) -> Callable[[], Any]:
        """Returns a function to where this rank is once the batch is done, as plain data."""
        readers, following = self._readers.readers, 0
        if chunk is not None:
            self._places = [*self._places]
            self._places[chunk.reader] = chunk.place
            following = chunk.reader + 1
            if self.kind == WHOLE:
                return partial(_plain, readers[:1], [chunk.place])
        turn = [(following + index) % len(readers) for index in range(len(readers))]  # who is next comes first
        return partial(_plain, [readers[reader] for reader in turn], [self._places[reader] for reader in turn])

    def _require_examples(self, counts: list[int]) -> None:
        if self._start:
            return
        if not sum(counts):
            raise self._empty()
        lacking = [dp_rank for dp_rank, count in enumerate(counts) if count == 0]
        if lacking and self.kind != WHOLE and not self._evaluates:
            raise ConfigError(
                f"{ranks_text(lacking)} of {len(counts)} got no examples of {self._source.name}: all must have some. "
                "Spread them over the shards evenly, or train with fewer processes"
            )

    def _empty(self) -> ConfigError:
        name, again = self._source.name, "Can it be read more than once? Its __iter__ must begin anew each time"
        if self._cut.drop_last:
            return ConfigError(
                f"{name} has no batch of {self._cut.batch_size} examples in epoch {self._epoch}, and drop_last leaves "
                f"out what does not fill a batch: lower batch_size or set drop_last to false. {again}"
            )
        return ConfigError(f"{name} has no examples in epoch {self._epoch}. {again}")


class Streams:
    def __init__(self, dp_rank: int, dp_size: int, seed: int, loading: Loading, fill: bool, multiple: int) -> None:
        self._dp_rank, self._dp_size, self._seed, self._loading = dp_rank, dp_size, seed, loading
        self._fill, self._multiple = fill, multiple
        self._sources: dict[int, Source] = {}
        self._passes: list[Pass] = []
        self._logged: set[str] = set()  # who reads what

    def source(self, data: Any) -> Source:
        """Returns the one source of a stream. It keeps its data, so that no other can come to have the same id."""
        return self._sources.setdefault(id(data), Source(data, type(data).__name__))

    def training(
        self, data: Any, batch_size: int, collate: Collate | None, accumulate: int, drop_last: bool, **how: Any
    ) -> Pass:
        cut = BatchSlice(
            self._dp_rank, self._dp_size, batch_size, accumulate, drop_last, self._fill, self._multiple, collate
        )
        made = Pass(self.source(data), cut, self._loading, seed=self._seed, **how)
        if made.who_reads not in self._logged:
            self._logged.add(made.who_reads)
            logger.info(made.who_reads)
        return self._opened(made)

    def evaluating(self, data: Any, batch_size: int, collate: Collate | None, alone: bool) -> Pass:
        dp_rank, dp_size = (0, 1) if alone else (self._dp_rank, self._dp_size)
        cut = BatchSlice(dp_rank, dp_size, batch_size, fill=self._fill, multiple=self._multiple, collate=collate)
        return self._opened(Pass(self.source(data), cut, self._loading, seed=self._seed, evaluates=True))

    def release(self) -> None:
        """Drops the streams that no pass reads now."""
        self._passes = [each for each in self._passes if not each.closed]
        if not self._passes:
            self._sources.clear()

    def close(self, at_once: bool = False) -> None:
        for each in self._passes:
            each.close(at_once)

    def _opened(self, made: Pass) -> Pass:
        self._passes = [*(each for each in self._passes if not each.closed), made]
        return made


def _plain(readers: list[ReaderShards], places: list[Any]) -> list[dict[str, Any]]:
    return [reader.rest(*place).plain() for reader, place in zip(readers, places, strict=True)]


def _digest(examples: list[Any]) -> str:
    """Returns the same for the same examples, as far as they can be compared."""
    digest = hashlib.blake2b(digest_size=8)
    for example in examples:
        for path, tensor in tensors_of(example):
            digest.update(path.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(_text(example).encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
        return value.tobytes().hex()
    if isinstance(value, dict):
        return ",".join(f"{key}:{_text(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(_text(each) for each in value)
    return type(value).__name__
