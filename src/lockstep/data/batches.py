"""The global batches of an epoch, and the micro-batches that a rank takes of them.

A global batch is the next `batch_size` examples of the order, whatever the number of ranks; a rank takes its slice of
each. So the mathematics of a run does not depend on how many devices it has, and a run may be resumed on another number
of processes and still sees every example once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from lockstep.config.training import Sizes
from lockstep.data.order import Order, Sequential, Shuffled, digest
from lockstep.data.permutation import Indices

# How many places of the order are asked for at once: few enough to begin at once, enough to be worth the call.
_AT_ONCE = 4096


class Position(NamedTuple):
    """Where the next global batch begins, and what was trained on before: all that its size may depend on."""

    batch: int = 0  # its number in this pass over the data
    begin: int = 0  # its first place in the order of the pass
    steps: int = 0  # batches of all passes
    tokens: int = 0  # of all passes


@dataclass(frozen=True)
class Ramps:
    """Sizes of batches and lengths of sequences by progress, and how many tokens an example has, if that is known."""

    batch: Sizes | None = None
    sequence: Sizes | None = None
    tokens: int | Indices | None = None  # of every example, or of each

    def facts(self) -> dict[str, Any]:
        """Returns what a position depends on, as plain data; empty without ramps and tokens."""
        tokens = digest(self.tokens) if isinstance(self.tokens, np.ndarray) else self.tokens
        given = {"batch_ramp": self.batch, "sequence_ramp": self.sequence, "tokens": tokens}
        return {name: str(each) for name, each in given.items() if each is not None}

    def tokens_of(self, at: Position, examples: int, indices: Callable[[], Indices]) -> int:
        """Returns the tokens of a batch at a position, cut to the length that sequences have there."""
        longest = None if self.sequence is None else self.sequence.at(at.steps, at.tokens)
        if isinstance(self.tokens, np.ndarray):
            each = self.tokens[indices()]
            return int(each.sum() if longest is None else np.minimum(each, longest).sum())
        return examples * min(self.tokens or 0, longest or self.tokens or 0)


class GlobalBatch(NamedTuple):
    at: Position
    size: int
    planned: int  # its size, were the data not at its end
    after: Position
    is_last: bool


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
    tokens: int = 0  # how many tokens the global batch has, where they are counted
    after: Position | None = None  # of data with an order: where the global batch ends

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
    ramps: Ramps = Ramps()  # `batch_size` is the largest

    @cached_property
    def order(self) -> Order:
        if self.given is not None:
            return self.given
        return Shuffled(self.count, self.seed) if self.shuffle else Sequential(self.count)

    @property
    def batches(self) -> int:
        """The number of global batches of the largest size in an epoch: the same on every rank."""
        whole, rest = divmod(self.order.length, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def micro_batches(self, epoch: int, start: int | Position = 0) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches of an epoch, from global batch `start` on."""
        at = Position(start, start * self.batch_size) if isinstance(start, int) else start
        walk, at_once = self.walk(epoch, at), max(1, _AT_ONCE * self.world_size // self.batch_size)
        while group := list(islice(walk, at_once)):
            slices = [self._slice(each) for each in group]
            positions = np.concatenate([each for pieces in slices for each, _ in pieces])
            indices = self.order.at(epoch, positions)
            end = 0
            for each, pieces in zip(group, slices, strict=True):
                in_leaf = len(pieces) // self._leaves_here if self._leaves_here else len(pieces)
                for number, (piece, examples) in enumerate(pieces):
                    end += len(piece)
                    taken = slice(end - len(piece), end)
                    last = number == len(pieces) - 1
                    weight = examples * (1 if self.leaves else self.world_size) / each.size
                    yield MicroBatch(
                        each.at.batch, number, indices[taken], examples, weight, each.size, last, last and each.is_last,
                        positions=positions[taken], leaf=self.rank * self._leaves_here + number // in_leaf,
                        tokens=each.after.tokens - each.at.tokens, after=each.after,
                    )  # fmt: skip

    def walk(self, epoch: int, at: Position) -> Iterator[GlobalBatch]:
        """Yields the global batches of an epoch: a pure function of the position that it begins at."""
        size, planned = self._sizes(at)
        while size:
            tokens = 0
            if self.ramps.tokens is not None:
                begin, end = at.begin, at.begin + size
                tokens = self.ramps.tokens_of(at, size, lambda b=begin, e=end: self.order.at(epoch, np.arange(b, e)))  # type: ignore[misc]
            after = Position(at.batch + 1, at.begin + size, at.steps + 1, at.tokens + tokens)
            following = self._sizes(after)
            yield GlobalBatch(at, size, planned, after, not following[0])
            at, (size, planned) = after, following

    def _sizes(self, at: Position) -> tuple[int, int]:
        """Returns the size of the global batch at a position, 0 at the end of the data, and that which is planned."""
        ramp = self.ramps.batch
        planned = self.batch_size if ramp is None else ramp.at(at.steps, at.tokens)
        left = max(0, self.order.length - at.begin)
        return (0 if self.drop_last and left < planned else min(planned, left)), planned

    @property
    def _leaves_here(self) -> int:
        return (self.leaves or 0) // self.world_size

    def _slice(self, batch: GlobalBatch) -> list[tuple[Indices, int]]:
        """Returns the positions of every micro-batch of a global batch, and how many examples each counts for."""
        begin, size = batch.at.begin, batch.size
        # A smaller batch of a ramp has fewer micro-batches, of the same size.
        accumulate = -(-self.accumulate * batch.planned // self.batch_size)
        if self.leaves:
            first = self.rank * self._leaves_here
            return [each for leaf in range(first, first + self._leaves_here)
                    for each in self._leaf(begin, size, leaf, accumulate)]  # fmt: skip
        mine = np.arange(begin + size * self.rank // self.world_size, begin + size * (self.rank + 1) // self.world_size)
        largest = -(-size // self.world_size)
        full = self._full_size(batch.planned, accumulate) if self.fill else 1
        # Every rank takes part in every exchange, also in those of a forward pass (SyncBatchNorm): so all of them have
        # the same number of micro-batches, and one without examples computes one that counts for nothing.
        pieces = min(accumulate, largest)
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

    def _leaf(self, begin: int, size: int, leaf: int, accumulate: int) -> list[tuple[Indices, int]]:
        assert self.leaves
        mine = np.arange(begin + size * leaf // self.leaves, begin + size * (leaf + 1) // self.leaves)
        pieces = np.array_split(mine, min(accumulate, -(-size // self.leaves)))
        return [(piece, len(piece)) if len(piece) else (np.array([begin]), 0) for piece in pieces]

    def _full_size(self, planned: int, accumulate: int) -> int:
        return -(-planned // (self.world_size * accumulate * self.multiple)) * self.multiple
