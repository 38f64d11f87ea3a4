"""The global order of examples, and the loader that walks it.

The order is a pure function of (seed, epoch). A global batch is the next `batch_size` examples of it, whatever the
number of ranks; a rank takes its slice of each. So the mathematics of a run does not depend on how many devices it
has, and a run may go on with another number of processes and still see every example once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from lockstep.errors import ConfigError
from lockstep.runtime.base import map_tensors

Indices = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]

_ORDER_STREAM, _SPLIT_STREAM, _FETCH_STREAM = 1, 2, 3


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
class Part:
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
class Walk:
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

    def parts(self, epoch: int, start: int = 0) -> Iterator[Part]:
        """This rank's parts of an epoch, from global batch `start` on."""
        order = example_order(self.count, self.seed, epoch, self.shuffle)
        for batch in range(start, self.batches):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            first = len(whole) * self.rank // self.world_size
            last = len(whole) * (self.rank + 1) // self.world_size
            yield from self._slices(batch, whole, whole[first:last])

    def _slices(self, batch: int, whole: Indices, mine: Indices) -> Iterator[Part]:
        ends_epoch = batch == self.batches - 1
        full = -(-self.batch_size // (self.world_size * self.accumulate)) if self.fill else 1
        if len(mine) == 0:
            # Every rank takes part in the exchange of gradients, so one without examples computes one that counts for
            # nothing.
            yield Part(batch, np.repeat(whole[:1], full), 0, 0.0, len(whole), True, ends_epoch)
            return
        pieces = np.array_split(mine, min(self.accumulate, len(mine)))
        for number, piece in enumerate(pieces, start=1):
            weight = self.world_size / len(whole)  # of one example
            last = number == len(pieces)
            missing = full - len(piece) if self.fill else 0
            if not missing:
                yield Part(batch, piece, len(piece), len(piece) * weight, len(whole), last, last and ends_epoch)
                continue
            # Filled up with its last example, and what that adds is taken back by a part of nothing but that example:
            # both have the usual shape, and the mean over the two is the mean over the piece.
            filler = np.repeat(piece[-1:], full)
            filled = np.concatenate([piece, filler[:missing]])
            yield Part(batch, filled, full, full * weight, len(whole), False, False)
            yield Part(batch, filler, -missing, -missing * weight, len(whole), last, last and ends_epoch)


@dataclass(frozen=True)
class Loading:
    """How examples are fetched: here, or by worker processes ahead of time."""

    workers: int = 0
    pin_memory: bool = False
    prefetch: int | None = None


class Loader:
    """Fetches the parts of a walk as batches. Worker processes, where there are any, live until close()."""

    def __init__(
        self, dataset: Dataset[Any], walk: Walk, collate: Collate | None = None, loading: Loading | None = None
    ) -> None:
        self.dataset, self.walk = dataset, walk
        self._fetch = batch_fetcher(dataset, collate)
        self._loading = loading or Loading()
        self._keys = _Keys()
        self._worker_loader: DataLoader[Any] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Part, Any]]:
        if self._loading.workers:
            return self._from_workers(epoch, start)
        return self._from_here(epoch, start)

    def _from_here(self, epoch: int, start: int) -> Iterator[tuple[Part, Any]]:
        pin = self._loading.pin_memory and torch.cuda.is_available()
        for part in self.walk.parts(epoch, start):
            batch = self._fetch(part.indices)
            yield part, (map_tensors(torch.Tensor.pin_memory, batch) if pin else batch)

    def _from_workers(self, epoch: int, start: int) -> Iterator[tuple[Part, Any]]:
        parts = list(self.walk.parts(epoch, start))
        self._keys.parts = [(self.walk.seed, epoch, part.batch, self.walk.rank, part.indices) for part in parts]
        if self._worker_loader is None:
            self._worker_loader = DataLoader(
                _PartDataset(self._fetch),
                batch_size=None,
                sampler=self._keys,
                num_workers=self._loading.workers,
                pin_memory=self._loading.pin_memory and torch.cuda.is_available(),
                prefetch_factor=self._loading.prefetch or 2,
                persistent_workers=True,
                # Of its own, since making an iterator draws a number: a resumed epoch makes one more than the original.
                generator=torch.Generator(),
            )
        yield from zip(parts, self._worker_loader, strict=True)

    def close(self) -> None:
        """End the worker processes."""
        self._worker_loader = None


def batch_fetcher(dataset: Dataset[Any], collate: Collate | None = None) -> Callable[[Indices], Any]:
    """A function from indices to a batch, by the fastest way that the dataset offers.

    Tensors are indexed at once; a dataset with `__getitems__` is asked for all examples in one call; any other is
    asked for one example at a time, as torch's DataLoader does.
    """
    if collate is None and type(dataset) is Subset and type(dataset.dataset) in (TensorDataset, Subset):
        within = np.asarray(dataset.indices, dtype=np.int64)
        within = np.where(within < 0, within + len(dataset.dataset), within)  # type: ignore[arg-type]
        return partial(_fetch_within, within, batch_fetcher(dataset.dataset))
    if collate is None and type(dataset) is TensorDataset:
        return partial(_fetch_tensors, dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    fetch = _fetch_together if callable(many) else _fetch_one_by_one
    return partial(fetch, dataset, collate or default_collate)


# Plain functions, not lambdas: worker processes that are spawned receive them pickled.


def _fetch_within(within: Indices, fetch: Callable[[Indices], Any], indices: Indices) -> Any:
    return fetch(within[indices])


def _fetch_tensors(tensors: tuple[torch.Tensor, ...], indices: Indices) -> Any:
    chosen = torch.from_numpy(indices)
    return [tensor.index_select(0, chosen) for tensor in tensors]


def _fetch_together(dataset: Any, collate: Collate, indices: Indices) -> Any:
    return collate(dataset.__getitems__(indices.tolist()))


def _fetch_one_by_one(dataset: Any, collate: Collate, indices: Indices) -> Any:
    return collate([dataset[index] for index in indices.tolist()])


def check_dataset(dataset: Any, name: str) -> int:
    """The number of examples; refuses what is not map-style or has nothing in it."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"task: {name} must return a map-style dataset (with __len__ and __getitem__), got {type(dataset).__name__}"
        )
    count = len(dataset)
    if count == 0:
        raise ConfigError(f"task: {name} returned a dataset of length 0: there is nothing to train on")
    return count


class _Keys(Sampler[Any]):
    """What the workers are to fetch next; filled anew for each epoch, so that the workers can stay."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class _PartDataset(Dataset[Any]):
    """Runs in a worker: fetches a whole part per request, with generators seeded by its place in the data."""

    def __init__(self, fetch: Callable[[Indices], Any]) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[int, int, int, int, Indices]) -> Any:
        seed, epoch, batch, rank, indices = key
        # Random augmentation then depends on the batch alone, not on which worker fetched it or when a run resumed.
        key_words = [_FETCH_STREAM, seed, epoch, batch, rank, int(indices[0])]
        words = np.random.SeedSequence(key_words).generate_state(3, np.uint64)
        torch.manual_seed(int(words[0] >> np.uint64(1)))
        random.seed(int(words[1]))
        np.random.seed(int(words[2] & np.uint64(0xFFFFFFFF)))
        return self._fetch(indices)


def _permutation(count: int, *key: int) -> Indices:
    # Sorting raw Philox words: numpy promises that a bit generator's words never change, but not what its shuffles do.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
