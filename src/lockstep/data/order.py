"""The global order of examples, and the micro-batches that a rank takes of it.

The order is a pure function of (seed, epoch). A global batch is the next `batch_size` examples of it, whatever the
number of ranks; a rank takes its slice of each. So the mathematics of a run does not depend on how many devices it
has, and a run may go on with another number of processes and still see every example once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset

Indices = npt.NDArray[np.int64]

_ORDER_STREAM, _SPLIT_STREAM = 1, 2  # FETCH_STREAM of the loader is 3


def example_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    """The order in which an epoch visits examples: a pure function of its arguments, on every machine."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    return _permutation(count, _ORDER_STREAM, seed, epoch)


def split(count: int, fractions: Mapping[str, float], seed: int) -> dict[str, Indices]:
    """Disjoint index sets by fraction, the same on every rank; together they hold every example once."""
    order = _permutation(count, _SPLIT_STREAM, seed, 0)
    ends = np.rint(np.cumsum(list(fractions.values())) * count).astype(int)
    # What rounding left over belongs to the last part that was asked for.
    asked = max(index for index, fraction in enumerate(fractions.values()) if fraction > 0)
    ends[asked:] = count
    starts = [0, *ends[:-1]]
    return {name: np.sort(order[start:end]) for name, start, end in zip(fractions, starts, ends, strict=True)}


def split_dataset(dataset: Dataset[Any], fractions: Mapping[str, float], seed: int) -> dict[str, Dataset[Any]]:
    parts = split(len(dataset), fractions, seed)  # type: ignore[arg-type]
    return {name: Subset(dataset, indices.tolist()) for name, indices in parts.items() if len(indices)}


@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes at once: its slice of a global batch, or one of the parts that the slice is taken in."""

    batch: int  # which global batch of the epoch
    indices: Indices
    # How many examples a mean over the indices counts for: none where the last batch has fewer examples than ranks,
    # less than none where it takes back what another part was filled up with.
    examples: int
    # The mean over ranks of the sum over parts of weight x mean loss is the mean loss over the global batch.
    weight: float
    whole: int  # how many examples the global batch has, over all ranks
    completes_batch: bool
    completes_epoch: bool


@dataclass(frozen=True)
class GlobalBatches:
    """How one rank walks through an epoch in global batches."""

    count: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    accumulate: int = 1
    # Give every part the same number of indices, where a new shape would have to be compiled.
    fill: bool = False

    @property
    def batches(self) -> int:
        """Global batches in an epoch: the same number on every rank."""
        whole, rest = divmod(self.count, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def parts(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """This rank's parts of an epoch, from global batch `start` on."""
        order = example_order(self.count, self.seed, epoch, self.shuffle)
        for batch in range(start, self.batches):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            first = len(whole) * self.rank // self.world_size
            last = len(whole) * (self.rank + 1) // self.world_size
            yield from self._slices(batch, whole, whole[first:last])

    def _slices(self, batch: int, whole: Indices, mine: Indices) -> Iterator[MicroBatch]:
        ends_epoch = batch == self.batches - 1
        full = -(-self.batch_size // (self.world_size * self.accumulate)) if self.fill else 1
        if len(mine) == 0:
            # Every rank takes part in the exchange of gradients, so one without examples computes one that counts for
            # nothing.
            yield MicroBatch(batch, np.repeat(whole[:1], full), 0, 0.0, len(whole), True, ends_epoch)
            return
        pieces = np.array_split(mine, min(self.accumulate, len(mine)))
        for number, piece in enumerate(pieces, start=1):
            weight = self.world_size / len(whole)  # of one example
            last = number == len(pieces)
            missing = full - len(piece) if self.fill else 0
            if not missing:
                yield MicroBatch(batch, piece, len(piece), len(piece) * weight, len(whole), last, last and ends_epoch)
                continue
            # Filled up with its last example, and what that adds is taken back by a part of nothing but that example:
            # both have the usual shape, and the mean over the two is the mean over the piece.
            filler = np.repeat(piece[-1:], full)
            filled = np.concatenate([piece, filler[:missing]])
            yield MicroBatch(batch, filled, full, full * weight, len(whole), False, False)
            yield MicroBatch(batch, filler, -missing, -missing * weight, len(whole), last, last and ends_epoch)


def _permutation(count: int, *key: int) -> Indices:
    # Sorting raw Philox words: numpy promises that a bit generator's words never change, but not what its shuffles do.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
