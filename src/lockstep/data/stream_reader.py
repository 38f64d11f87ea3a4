"""Streams, the pieces they fall into, and a reader that takes examples of its pieces and knows where it is.

A stream with `num_shards` and `shard(num_shards, index)` (Hugging Face's names) is divided by its pieces. Any other is
read whole by every rank, each of which keeps its examples; one with `is_share` is divided by rank already. A piece is
read in chunks. At the beginning of each the states of the stream and of its random number generators are noted, so that
a chunk that is read again has the same examples. A place is the beginning of a chunk, and how many of its examples are
used. Every piece draws from its own generators: which rank reads it, and in chunks of what size, changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.data.permutation import sorted_words
from lockstep.data.seeding import (
    COLLATING,
    READING,
    SHARDS,
    SHUFFLING,
    States,
    generators_kept,
    load_generators,
    saved_generators,
    seed_by,
)
from lockstep.errors import ConfigError

PIECES, WHOLE, OWN = "pieces", "whole", "own"

# {"read": examples before the chunk, "size": of chunks, "offset": used of the chunk, "state": of the stream at its
# beginning, "random": of the generators, where anything was drawn from them}. Plain data: it is saved.
Mark = dict[str, Any]


def is_stream(data: Any) -> bool:
    """Whether data is read from its beginning on; other data is asked for by index."""
    if isinstance(data, IterableDataset):
        return True
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return hasattr(data, "__iter__") and not by_index


def check_stream(data: Any, name: str) -> None:
    """Refuses what cannot be read again, or is not made of examples."""
    if getattr(data, "batch_sampler", None) is not None:
        raise ConfigError(
            f"{name}: a {type(data).__name__} makes batches, and Lockstep divides examples among ranks and puts them "
            "into batches itself: return its dataset (data.workers sets how many workers read it), or make the loader "
            "with batch_size=None. Batches of your own loader are for run.stream"
        )
    if hasattr(data, "__next__") and not is_stateful(data):
        raise ConfigError(
            f"{name}: a {type(data).__name__} can be read once, and the next epoch, an evaluation and a resume read it "
            "again: return an object whose __iter__ makes it"
        )


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Opened:
    def __init__(self, stream: Any, state: Any, name: str) -> None:
        self.ended = self.closed = False
        self._holder = stream if is_stateful(stream) and keeps_all(stream) else None
        if self._holder is not None and state is not None:
            self._holder.load_state_dict(copy.deepcopy(state))
        iterator: Any = iter(stream)
        self.examples: Iterator[Any] = iterator
        if self._holder is None and iterator is not stream and is_stateful(iterator):
            self._holder = iterator
            if state is not None:
                iterator.load_state_dict(copy.deepcopy(state))
        if state is not None and self._holder is None:
            raise ConfigError(
                f"{name}: it was saved with a state, and has none any more (no state_dict and load_state_dict): give "
                "them back, or resume from a checkpoint at the end of an epoch"
            )

    def state(self) -> Any:
        """Returns where it is, or None where it has no state."""
        return None if self._holder is None else copy.deepcopy(self._holder.state_dict())

    def close(self) -> None:
        self.closed = True
        close = getattr(self.examples, "close", None)
        if callable(close):
            close()


class Source:
    """A stream, and how parts of it are opened. It is pickled to workers."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        count = getattr(data, "num_shards", None)
        # None where there is no way to have one of them.
        self.pieces = count if isinstance(count, int) and callable(getattr(data, "shard", None)) else None
        self._first: Any = None  # the state before anything was read, of an object that keeps its own place
        self._reading: Opened | None = None
        self._moved = False  # whether another process read on in it before it came here

    def __getstate__(self) -> dict[str, Any]:
        moved = self._moved or (self._reading is not None and not self._reading.ended)
        return {**self.__dict__, "_reading": None, "_moved": moved}

    def kind(self, dp_size: int) -> str:
        """Returns how it is divided among so many."""
        if getattr(self.data, "is_share", False) or getattr(self.data, "_distributed", None) is not None:
            return OWN  # or split by Hugging Face's split_dataset_by_node
        if self.pieces is None or (self.pieces < dp_size and _is_of_datasets(self.data)):
            return WHOLE
        return PIECES

    def open(self, piece: int, count: int, epoch: int | None, state: Any = None) -> Opened:
        """Opens one of `count` pieces, at its beginning or at a state that it had."""
        itself = self.pieces is None
        stream = self.data if itself else self.data.shard(num_shards=count, index=piece)
        set_epoch = getattr(stream, "set_epoch", None)
        if epoch is not None and callable(set_epoch):
            set_epoch(epoch)
        if not itself or not is_stateful(stream):
            return Opened(stream, state, self.name)
        self._begin_anew()
        self._reading = Opened(stream, state, self.name)
        return self._reading

    def _begin_anew(self) -> None:
        """An object that keeps its own place, and was left in the middle of a pass, is set back to where it was at
        first."""
        if self._first is None:
            self._first = copy.deepcopy(self.data.state_dict())
        elif self._reading is not None and not self._reading.closed:
            raise ConfigError(
                f"{self.name}: it is being read already, and keeps its place in itself (state_dict): read an object of "
                "its own for the second purpose"
            )
        elif self._moved or (self._reading is not None and not self._reading.ended):
            self._moved = False
            self.data.load_state_dict(copy.deepcopy(self._first))


def keeps_all(stream: Any) -> bool:
    """Whether the state of a stream is enough to resume. That of a Hugging Face dataset with a shuffle buffer leaves
    out what the buffer holds, so that examples would be lost; its documentation names both cases."""
    if not _is_of_datasets(stream):
        return True
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        # A batched map() after with_format("arrow").
        of_tables = getattr(each, "batched", False) and getattr(getattr(each, "formatting", None), "is_table", False)
        if type(each).__name__ == "BufferShuffledExamplesIterable" or of_tables:
            return False
        inner = (getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ()))
        waiting += [within for within in inner if within is not None]
    return True


def _is_of_datasets(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets"


@dataclass(frozen=True)
class Reading:
    """How the pieces of one pass are read: the same for all readers."""

    source: Source
    pieces: int  # how many there are, of all readers
    chunk: int  # examples
    shuffle: bool = False  # the examples of a chunk
    seed: int = 0
    epoch: int = 0
    set_epoch: bool = True
    own: tuple[int, ...] = ()  # which dp rank and worker, where each of them has another stream
    walk: str = ""  # tells the random numbers of two passes over one stream apart


@dataclass
class ReaderShards:
    """The pieces that one reader has to read, and where those are continued that were begun before."""

    pieces: list[int]
    marks: dict[int, Mark] = field(default_factory=dict)
    number: int = 0  # which of its rank's readers it is, for streams that are another one in every worker

    @property
    def to_discard(self) -> int:
        """The number of examples that are read again to come back to a place, since there is no state."""
        return sum(mark["read"] + mark["offset"] for mark in self.marks.values() if mark["state"] is None)

    def rest(self, at: int, mark: Mark | None) -> ReaderShards:
        """Returns what is left, once the reader is in piece number `at`."""
        pieces = self.pieces[at:]
        marks = {piece: self.marks[piece] for piece in pieces[1:] if piece in self.marks}
        return ReaderShards(pieces, {**({pieces[0]: mark} if mark and pieces else {}), **marks}, self.number)

    def plain(self) -> dict[str, Any]:
        marks = {str(piece): mark for piece, mark in self.marks.items()}
        return {"pieces": self.pieces, "marks": marks, "number": self.number}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> ReaderShards:
        marks = {int(piece): mark for piece, mark in plain["marks"].items()}
        return cls(list(plain["pieces"]), marks, plain["number"])


class StreamReader:
    def __init__(self, reading: Reading, shards: ReaderShards) -> None:
        self._reading, self._shards = reading, shards
        self._at = 0
        self._opened: Opened | None = None
        self._chunk: list[Any] = []
        self._offset = self._read = 0
        self._size = reading.chunk
        self._state: Any = None  # at the beginning of the chunk
        self._random: Any = None  # of the generators, at the beginning of the chunk
        self._seeded = self._generators = States.now()  # of the piece: when it was opened, and now
        self._drawn: Any = None  # their state now, as plain data, where they are not as they were seeded

    def take(self, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count and (self._offset < len(self._chunk) or self._read_on()):
            part = self._chunk[self._offset : self._offset + count - len(taken)]
            self._offset += len(part)
            taken += part
        return taken

    def place(self) -> tuple[int, Mark | None]:
        """Returns which piece it is in, and where in it, for `ReaderShards.rest`."""
        used_up = self._offset == len(self._chunk)
        if self._opened is None or (used_up and self._ended):
            # Nothing of the next piece is read here, but another reader may have begun it before the run was resumed.
            at, pieces = self._at + (self._opened is not None), self._shards.pieces
            return at, self._shards.marks.get(pieces[at]) if at < len(pieces) else None
        if used_up:
            self._begin_chunk()
        mark = {"read": self._read, "size": self._size, "offset": self._offset, "state": self._state}
        return self._at, {**mark, "random": self._random}

    @property
    def position(self) -> int:
        return self._read + self._offset

    @property
    def piece(self) -> int:
        pieces = self._shards.pieces
        return pieces[min(self._at, len(pieces) - 1)] if pieces else 0

    def first(self, count: int) -> str:
        """Returns what a message calls the first examples of the current piece."""
        shard = f", shard {self.piece}" if self._reading.pieces > 1 else ""
        return f"the first {count} examples of {self._reading.source.name}{shard}"

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # Inside

    @property
    def _ended(self) -> bool:
        return self._opened is not None and self._opened.ended

    def _read_on(self) -> bool:
        """Reads the next chunk that has an example; False where there is none left."""
        while self._at < len(self._shards.pieces):
            if self._opened is None:
                self._open()
            elif self._ended:
                self._opened.close()
                self._opened, self._at = None, self._at + 1
                continue
            else:
                if self._chunk:
                    self._begin_chunk()
                self._read_chunk()
            if self._offset < len(self._chunk):
                return True
        return False

    def _open(self) -> None:
        """Opens the current piece, at the place where it was left."""
        how, piece = self._reading, self._shards.pieces[self._at]
        mark = self._shards.marks.get(piece, {"read": 0, "size": how.chunk, "offset": 0, "state": None, "random": None})
        self._chunk, self._offset, self._drawn = [], 0, mark["random"]
        self._read, self._size, self._state, self._random = mark["read"], mark["size"], mark["state"], mark["random"]
        with generators_kept():
            self._seed(READING, 0)
            self._seeded = States.now()
            self._opened = how.source.open(piece, how.pieces, how.epoch if how.set_epoch else None, self._state)
            if self._state is not None:
                self._seeded.restore()
                if self._random is not None:
                    load_generators(self._random)
            self._generators = States.now()
        if self._state is None and self._read:
            found = len(self._examples(self._read, before=0, keep=False))
            if found < self._read:
                raise self._shorter(self._read, found)
        self._read_chunk()
        self._offset = mark["offset"]
        if self._offset > len(self._chunk):
            raise self._shorter(self._read + self._offset, self._read + len(self._chunk))

    def _shorter(self, done: int, found: int) -> ConfigError:
        return ConfigError(
            f"{self._reading.source.name}: {done} examples of shard {self.piece} were done when the checkpoint was "
            f"made, but it ends after {found}: it is not the same data. Restore it as it was, or resume from a "
            "checkpoint at the end of an epoch"
        )

    def _begin_chunk(self) -> None:
        assert self._opened is not None
        self._read, self._offset, self._chunk = self._read + len(self._chunk), 0, []
        self._state, self._random = self._opened.state(), self._drawn

    def _read_chunk(self) -> None:
        assert self._opened is not None
        self._chunk = self._examples(self._size, before=self._read)
        self._opened.ended = len(self._chunk) < self._size
        if self._reading.shuffle:
            key = [SHUFFLING, *self._key(self._read)]
            self._chunk = [self._chunk[index] for index in sorted_words(len(self._chunk), *key)]

    def _examples(self, count: int, before: int, keep: bool = True) -> list[Any]:
        """Returns the next examples of the piece, after `before` others; its code draws from the piece's generators.

        Without `keep`, nothing is held in place of each: there may be more than fit into memory."""
        assert self._opened is not None
        with generators_kept():
            self._generators.restore()
            found: list[Any] = []
            try:
                found.extend(each if keep else None for each in islice(self._opened.examples, count))
            except Exception as error:
                error.add_note(f"reading on after {self.first(before + len(found))}")
                raise
            self._generators = States.now()
            self._drawn = saved_generators() if self._seeded.moved() else None
        return found

    def _key(self, position: int) -> list[int]:
        how = self._reading
        return [how.seed, how.epoch, self.piece, position, *how.own]

    def _seed(self, purpose: int, position: int, *dp_rank: int) -> None:
        seed_by((purpose, self._reading.walk, *self._key(position), *dp_rank))

    def seed_for_collating(self, dp_rank: int) -> None:
        """A batch is collated with random numbers of the place of its last example."""
        self._seed(COLLATING, self.position, dp_rank)


def piece_order(count: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    return sorted_words(count, SHARDS, seed, epoch).tolist() if shuffle else list(range(count))
