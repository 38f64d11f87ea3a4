"""One reader of a stream: it takes examples of its pieces, one piece after the other, and can tell where it is.

A piece is read in chunks. At the beginning of each the states of the stream and of its random number generators are
noted, so that a chunk that is read again has the same examples: shuffled in the same way, augmented by the same random
numbers. A place is therefore the beginning of a chunk, and how many of its examples are used. Every piece draws from
generators of its own, seeded when it is opened: which rank reads it, and in chunks of what size, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

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
from lockstep.data.sources import Opened, Source
from lockstep.errors import ConfigError

# {"read": examples before the chunk, "size": of chunks, "offset": used of the chunk, "state": of the stream at its
# beginning, "random": of the generators, where anything was drawn from them}. Plain data: it is saved.
Mark = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """How the pieces of one pass are read: the same for all lanes."""

    source: Source
    pieces: int  # how many there are, of all lanes
    chunk: int  # examples
    shuffle: bool = False  # the examples of a chunk
    seed: int = 0
    epoch: int = 0
    set_epoch: bool = True
    own: tuple[int, ...] = ()  # which share and worker, where each of them has another stream
    walk: str = ""  # tells the random numbers of two passes over one stream apart


@dataclass
class ReaderShards:
    """What one reader has to read: pieces, and where those are gone on with that were begun before."""

    pieces: list[int]
    marks: dict[int, Mark] = field(default_factory=dict)
    number: int = 0  # which of its rank's lanes it is, for streams that are another one in every worker

    @property
    def to_discard(self) -> int:
        """Examples that have to be read from the beginning to come back to where it was, since there is no state."""
        return sum(mark["read"] + mark["offset"] for mark in self.marks.values() if mark["state"] is None)

    def rest(self, at: int, mark: Mark | None) -> ReaderShards:
        """What is left, once the reader is in piece number `at`."""
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
        """Which piece it is in, and where in it; to be given to `Lane.rest`."""
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

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # Inside

    @property
    def _ended(self) -> bool:
        return self._opened is not None and self._opened.ended

    def _read_on(self) -> bool:
        """Read the next chunk that has an example; False where there is none left."""
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
        """Open the piece at hand, and come to where it was left."""
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
            found = len(self._examples(self._read))
            if found < self._read:
                raise self._shorter(self._read, found)
        self._read_chunk()
        self._offset = mark["offset"]
        if self._offset > len(self._chunk):
            raise self._shorter(self._read + self._offset, self._read + len(self._chunk))

    def _shorter(self, done: int, found: int) -> ConfigError:
        return ConfigError(
            f"{self._reading.source.name}: {done} examples of shard {self.piece} were done when the checkpoint was "
            f"made, but it ends after {found}: it is not the same data. Give it back as it was, or go on from a "
            "checkpoint at the end of an epoch"
        )

    def _begin_chunk(self) -> None:
        """All of the chunk is used: the next begins here."""
        assert self._opened is not None
        self._read, self._offset, self._chunk = self._read + len(self._chunk), 0, []
        self._state, self._random = self._opened.state(), self._drawn

    def _read_chunk(self) -> None:
        assert self._opened is not None
        self._chunk = self._examples(self._size)
        self._opened.ended = len(self._chunk) < self._size
        if self._reading.shuffle:
            key = [SHUFFLING, *self._key(self._read)]
            self._chunk = [self._chunk[index] for index in _permutation(len(self._chunk), key)]

    def _examples(self, count: int) -> list[Any]:
        """The next examples of the piece; its code draws from the generators of the piece."""
        assert self._opened is not None
        with generators_kept():
            self._generators.restore()
            found = list(islice(self._opened.examples, count))
            self._generators = States.now()
            self._drawn = saved_generators() if self._seeded.moved() else None
        return found

    def _key(self, position: int) -> list[int]:
        how = self._reading
        return [how.seed, how.epoch, self.piece, position, *how.own]

    def _seed(self, purpose: int, position: int, *dp_rank: int) -> None:
        seed_by((purpose, self._reading.walk, *self._key(position), *dp_rank))

    def seed_for_collating(self, dp_rank: int) -> None:
        """A batch is put together with random numbers of its own: those of its last example's place."""
        self._seed(COLLATING, self.position, dp_rank)


def piece_order(count: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    return _permutation(count, [SHARDS, seed, epoch]) if shuffle else list(range(count))


def _permutation(count: int, key: Sequence[int]) -> list[int]:
    # As in order.py: words of a bit generator never change, what is made of them may.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return [int(index) for index in np.argsort(words, kind="stable")]
