"""Fetches a rank's micro-batches of a dataset: here, or by worker processes ahead of time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from lockstep.data import packed, workers
from lockstep.data.order import GlobalBatches, MicroBatch
from lockstep.data.packed import Packed
from lockstep.data.permutation import Indices
from lockstep.data.split import Part
from lockstep.errors import ConfigError
from lockstep.runtime.moving import pinned

Collate = Callable[[list[Any]], Any]

_FETCH_STREAM = 3  # orders.py has the others


@dataclass(frozen=True)
class Loading:
    """How examples are fetched: here, or by worker processes ahead of time."""

    workers: int = 0
    pin_memory: bool = False
    prefetch: int | None = None


class Loader:
    """Fetches micro-batches. Worker processes, where there are any, live until close()."""

    def __init__(
        self, dataset: Dataset[Any], plan: GlobalBatches, collate: Collate | None = None, loading: Loading | None = None
    ) -> None:
        self.dataset, self.collate, self.plan = dataset, collate, plan
        self._fetch = batch_fetcher(dataset, collate)
        self._loading = loading or Loading()
        self._keys = _Keys()
        self._worker_loader: DataLoader[Any] | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, Any]]:
        if self._loading.workers:
            return self._from_workers(epoch, start)
        return self._from_here(epoch, start)

    @property
    def fetches_ahead(self) -> bool:
        """Whether others fetch: then a batch may be asked for early, without drawing random numbers of this process."""
        return self._loading.workers > 0

    def first(self) -> tuple[MicroBatch, Any]:
        """The first micro-batch, fetched here."""
        micro = next(iter(self.plan.micro_batches(0)))
        return micro, self._fetch(micro.indices)

    def _from_here(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        pin = self._loading.pin_memory and torch.cuda.is_available()
        for micro in self.plan.micro_batches(epoch, start):
            batch = self._fetch(micro.indices)
            yield micro, (pinned(batch) if pin else batch)

    def _from_workers(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        asked: deque[MicroBatch] = deque()  # of the workers, and not handed out yet
        self._keys.next_ones = self._asking(epoch, start, asked)
        if self._worker_loader is None:
            self._worker_loader = DataLoader(
                _MicroBatchDataset(batch_fetcher(self.dataset, self.collate, packs=True)),
                batch_size=None,
                collate_fn=_as_it_is,
                sampler=self._keys,
                num_workers=self._loading.workers,
                pin_memory=self._loading.pin_memory and torch.cuda.is_available(),
                prefetch_factor=self._loading.prefetch or 2,
                persistent_workers=True,
                multiprocessing_context=workers.context(),
                worker_init_fn=workers.begin,
                # Of its own, since making an iterator draws a number: a resumed epoch makes one more than the original.
                generator=torch.Generator(),
            )
        with workers.signals_kept_back():
            fetched = iter(self._worker_loader)
        for batch in fetched:
            yield asked.popleft(), batch.unpacked() if isinstance(batch, Packed) else batch
        assert not asked, f"the workers did not fetch {len(asked)} micro-batches"

    def _asking(self, epoch: int, start: int, asked: deque[MicroBatch]) -> Iterator[Any]:
        """What the workers are to fetch, one micro-batch after the other, as they get to it."""
        plan = self.plan
        for micro in plan.micro_batches(epoch, start):
            asked.append(micro)
            yield plan.seed, epoch, micro.batch, plan.rank, micro.indices

    def close(self, at_once: bool = False) -> None:
        """End the worker processes."""
        loader, self._worker_loader = self._worker_loader, None
        if loader is not None:
            workers.end(loader, at_once)


def batch_fetcher(
    dataset: Dataset[Any], collate: Collate | None = None, packs: bool = False
) -> Callable[[Indices], Any]:
    """A function from indices to a batch, by the fastest way that the dataset offers.

    Tensors are indexed at once; a dataset with `__getitems__` is asked for all examples in one call; any other is
    asked for one example at a time, as torch's DataLoader does. In a worker, a batch is packed for its way (`packs`).
    """
    if isinstance(dataset, Part):
        return partial(_fetch_part, dataset, batch_fetcher(dataset.dataset, collate, packs))
    if collate is None and type(dataset) is Subset and type(dataset.dataset) in (TensorDataset, Subset):
        within = np.asarray(dataset.indices, dtype=np.int64)
        within = np.where(within < 0, within + len(dataset.dataset), within)  # type: ignore[arg-type]
        return partial(_fetch_within, within, batch_fetcher(dataset.dataset))
    if collate is None and type(dataset) is TensorDataset:
        return partial(_fetch_tensors, dataset.tensors)
    many = getattr(dataset, "__getitems__", None)
    fetch = _fetch_together if callable(many) else _fetch_one_by_one
    return partial(fetch, dataset, collate or (packed.collate if packs else default_collate))


def _as_it_is(batch: Any) -> Any:
    """In place of what torch would do to a batch from a worker, and not to one that is fetched here."""
    return batch


# Plain functions, not lambdas: worker processes that are spawned receive them pickled.


def _fetch_part(part: Part, fetch: Callable[[Indices], Any], indices: Indices) -> Any:
    return fetch(part.whole(indices))


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
            f"task: {name} must return a map-style dataset (with __len__ and __getitem__) or a stream (with __iter__), "
            f"got {type(dataset).__name__}"
        )
    count = len(dataset)
    if count == 0:
        raise ConfigError(f"task: {name} returned a dataset of length 0: there is nothing to train on")
    return count


class _Keys(Sampler[Any]):
    """What the workers are to fetch next; given anew for each epoch, so that the workers can stay."""

    def __init__(self) -> None:
        self.next_ones: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.next_ones


class _MicroBatchDataset(Dataset[Any]):
    """Runs in a worker: fetches a whole micro-batch per request, with generators seeded by its place in the data."""

    def __init__(self, fetch: Callable[[Indices], Any]) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[int, int, int, int, Indices]) -> Any:
        seed, epoch, batch, rank, indices = key
        # Random augmentation then depends on the batch alone, not on which worker fetched it or when a run resumed.
        key_words = [_FETCH_STREAM, seed, epoch, batch, rank, int(indices[0])]
        words = np.random.SeedSequence(key_words).generate_state(3, np.uint64)
        # Not torch.manual_seed, which writes down a stack trace for the GPUs that a worker does not have.
        torch.default_generator.manual_seed(int(words[0] >> np.uint64(1)))
        random.seed(int(words[1]))
        np.random.seed(int(words[2] & np.uint64(0xFFFFFFFF)))
        return self._fetch(indices)
