"""The global batches of an epoch, and the micro-batches that a rank takes of them.

A global batch is the next `batch_size` examples of the order, whatever the number of ranks; a rank takes its slice of
each. So the mathematics of a run does not depend on how many devices it has, and a run may be resumed on another number
of processes and still sees every example once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.order import Order, Sequential, Shuffled
from lockstep.data.permutation import Indices

# How many places of the order are asked for at once: few enough to begin at once, enough to be worth the call.
_AT_ONCE = 4096


class MicroBatch(NamedTuple):
    """What a rank computes at once: its slice of a global batch, or one of the pieces of the slice."""

    batch: int  # which global batch of the epoch
    number: int  # which of the rank's micro-batches of it
    indices: Indices
    # How many examples a mean over the micro-batch counts for: none where the last batch has fewer examples than ranks,
    # less than none where it takes back what another one was filled up with.
    examples: int
    # The mean over ranks of the sum over micro-batches of weight x mean loss is the mean loss over the global batch.
    weight: float
    whole: int  # how many examples the global batch has, over all ranks
    completes_batch: bool
    completes_epoch: bool
    # Of a stream: says where it is once the batch is done, as plain data.
    place: Callable[[], Any] | None = None
    # Of other data: where each of its examples is in the order of the epoch, by which its random numbers are seeded.
    positions: Indices | None = None
    leaf: int = 0  # with `leaves`: which one of the global batch it belongs to

    @property
    def scale(self) -> float:
        """How often a sum over the micro-batch counts: once, unless it holds filler."""
        return self.examples / (len(self.indices) or self.examples or 1)


@dataclass(frozen=True)
class GlobalBatches:
    """The global batches of an epoch, and the micro-batches that one rank takes of each."""

    count: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    accumulate: int = 1
    # Give every micro-batch the same number of indices, where a new shape would have to be compiled; a multiple of
    # this number, where each is spread over so many devices.
    fill: bool = False
    multiple: int = 1

    # Divide every global batch into so many leaves, of which a rank takes its neighbouring ones: the same micro-batches
    # on any number of ranks. Their weights are for a sum over ranks.
    leaves: int | None = None

    given: Order | None = None  # else shuffled or sequential

    @cached_property
    def order(self) -> Order:
        if self.given is not None:
            return self.given
        return Shuffled(self.count, self.seed) if self.shuffle else Sequential(self.count)

    @property
    def batches(self) -> int:
        """The number of global batches in an epoch: the same on every rank."""
        whole, rest = divmod(self.order.length, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches of an epoch, from global batch `start` on."""
        batches = self.batches
        at_once = max(1, _AT_ONCE * self.world_size // self.batch_size)
        for first in range(start, batches, at_once):
            slices = [self._slice(batch) for batch in range(first, min(first + at_once, batches))]
            positions = np.concatenate([each for pieces in slices for each, _ in pieces])
            indices = self.order.at(epoch, positions)
            end = 0
            for batch, pieces in enumerate(slices, first):
                whole = self._size(batch)
                in_leaf = len(pieces) // self._leaves_here if self._leaves_here else len(pieces)
                for number, (piece, examples) in enumerate(pieces):
                    end += len(piece)
                    taken = slice(end - len(piece), end)
                    last = number == len(pieces) - 1
                    weight = examples * (1 if self.leaves else self.world_size) / whole
                    ends_epoch = last and batch == batches - 1
                    yield MicroBatch(
                        batch, number, indices[taken], examples, weight, whole, last, ends_epoch,
                        positions=positions[taken], leaf=self.rank * self._leaves_here + number // in_leaf,
                    )  # fmt: skip

    def _size(self, batch: int) -> int:
        return min(self.batch_size, self.order.length - batch * self.batch_size)

    @property
    def _leaves_here(self) -> int:
        return (self.leaves or 0) // self.world_size

    def _slice(self, batch: int) -> list[tuple[Indices, int]]:
        """Returns the positions of every micro-batch of a global batch, and how many examples each counts for."""
        begin, size = batch * self.batch_size, self._size(batch)
        if self.leaves:
            first = self.rank * self._leaves_here
            return [each for leaf in range(first, first + self._leaves_here) for each in self._leaf(begin, size, leaf)]
        mine = np.arange(begin + size * self.rank // self.world_size, begin + size * (self.rank + 1) // self.world_size)
        largest = -(-size // self.world_size)
        full = self._full_size if self.fill else 1
        # Every rank takes part in every exchange, also in those of a forward pass (SyncBatchNorm): so all of them have
        # the same number of micro-batches, and one without examples computes one that counts for nothing.
        pieces = min(self.accumulate, largest)
        found: list[tuple[Indices, int]] = []
        for piece in [mine] if pieces == 1 else np.array_split(mine, pieces):
            if len(piece) == 0:
                found.append((np.repeat(begin, full), 0))
                continue
            missing = full - len(piece) if self.fill else 0
            if not missing:
                found.append((piece, len(piece)))
                continue
            # Filled up with its last example, and what that adds is taken back by one of nothing but that example:
            # both have the usual shape, and the mean over the two is the mean over the piece.
            filler = np.repeat(piece[-1:], full)
            found += [(np.concatenate([piece, filler[:missing]]), full), (filler, -missing)]
        return found

    def _leaf(self, begin: int, size: int, leaf: int) -> list[tuple[Indices, int]]:
        assert self.leaves
        mine = np.arange(begin + size * leaf // self.leaves, begin + size * (leaf + 1) // self.leaves)
        pieces = np.array_split(mine, min(self.accumulate, -(-size // self.leaves)))
        return [(piece, len(piece)) if len(piece) else (np.array([begin]), 0) for piece in pieces]

    @property
    def _full_size(self) -> int:
        return -(-self.batch_size // (self.world_size * self.accumulate * self.multiple)) * self.multiple
