"""The global order of examples, and the micro-batches that a rank takes of it.

The order is a pure function of (seed, epoch). A global batch is the next `batch_size` examples of it, whatever the
number of ranks; a rank takes its slice of each. So the mathematics of a run does not depend on how many devices it
has, and a run may go on with another number of processes and still see every example once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class MicroBatch(NamedTuple):
    """What a rank computes at once: its share of a global batch, or one of the pieces that the share is taken in."""

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

    @property
    def batches(self) -> int:
        """Global batches in an epoch: the same number on every rank."""
        whole, rest = divmod(self.count, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an epoch, from global batch `start` on."""
        order = example_order(self.count, self.seed, epoch, self.shuffle)
        for batch in range(start, self.batches):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            ends_epoch = batch == self.batches - 1
            shares = list(self._share(whole))
            for number, (indices, examples) in enumerate(shares):
                last = number == len(shares) - 1
                weight = examples * self.world_size / len(whole)
                yield MicroBatch(batch, number, indices, examples, weight, len(whole), last, last and ends_epoch)

    def _share(self, whole: Indices) -> Iterator[tuple[Indices, int]]:
        """The indices of every micro-batch of a global batch, and how many examples each counts for."""
        first = len(whole) * self.rank // self.world_size
        mine = whole[first : len(whole) * (self.rank + 1) // self.world_size]
        largest = -(-len(whole) // self.world_size)
        full = self._full_size if self.fill else 1
        # Every rank takes part in every exchange, also in those of a forward pass (SyncBatchNorm): so all of them have
        # the same number of micro-batches, and one without examples computes one that counts for nothing.
        pieces = min(self.accumulate, largest)
        for piece in [mine] if pieces == 1 else np.array_split(mine, pieces):
            if len(piece) == 0:
                yield np.repeat(whole[:1], full), 0
                continue
            missing = full - len(piece) if self.fill else 0
            if not missing:
                yield piece, len(piece)
                continue
            # Filled up with its last example, and what that adds is taken back by one of nothing but that example:
            # both have the usual shape, and the mean over the two is the mean over the piece.
            filler = np.repeat(piece[-1:], full)
            yield np.concatenate([piece, filler[:missing]]), full
            yield filler, -missing

    @property
    def _full_size(self) -> int:
        return -(-self.batch_size // (self.world_size * self.accumulate * self.multiple)) * self.multiple


def _permutation(count: int, *key: int) -> Indices:
    # Sorting raw Philox words: numpy promises that a bit generator's words never change, but not what its shuffles do.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
