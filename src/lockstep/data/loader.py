"""Fetches a rank's micro-batches of a dataset: here, or by worker processes ahead of time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from lockstep.data import workers
from lockstep.data.order import GlobalBatches, MicroBatch
from lockstep.data.permutation import Indices
from lockstep.data.seeding import COLLATING, FETCHING, Key, States, generators_kept, seed_by
from lockstep.data.split import Part
from lockstep.errors import ConfigError
from lockstep.runtime.moving import pinned

_ALIGNED_TO = 64
_LEAST_PART = 1 / 4  # of the file that a view must be: so a kept one holds at most four times its own size
_NUMBERS = {int: torch.int64, float: torch.float64}  # as default_collate has them


class Column(NamedTuple):
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Packed(NamedTuple):
    """A batch on its way from a worker in one file of shared memory, where torch has one for every tensor.

    Columns are views of it. A small one (labels) is copied out: a view that is kept keeps the whole file.
    """

    memory: Tensor  # bytes
    columns: tuple[Column, ...]
    keys: tuple[Any, ...] | None  # of mappings; None: a list

    def unpacked(self) -> Any:
        # In page-locked memory, a batch is on its way to a device: a copy would not be page-locked.
        shared = self.memory.is_shared()  # type: ignore[no-untyped-call]
        least = _LEAST_PART * len(self.memory) if shared else 0
        found = [each.of(self.memory).clone() if each.size < least else each.of(self.memory) for each in self.columns]
        return found if self.keys is None else dict(zip(self.keys, found, strict=True))


def collate(examples: Sequence[Any]) -> Any:
    """In a worker: what default_collate makes of these examples; tuples, lists and dicts of tensors are packed."""
    first = examples[0]
    keys = tuple(first) if type(first) is dict else None
    if keys is None and type(first) not in (tuple, list):
        return default_collate(list(examples))
    width = len(first)
    if width < 2 or any(type(each) is not type(first) or len(each) != width for each in examples):
        return default_collate(list(examples))
    rows = [[each[key] for key in keys] for each in examples] if keys is not None else examples
    values = list(zip(*rows, strict=True))
    columns, size = [], 0
    for column in values:
        shape_and_type = _shape_and_type(column)
        if shape_and_type is None:
            return default_collate(list(examples))
        shape, dtype = shape_and_type
        columns.append(Column(size, dtype, (len(examples), *shape)))
        size += -(-math.prod(columns[-1].shape) * dtype.itemsize // _ALIGNED_TO) * _ALIGNED_TO
    if not size:
        return default_collate(list(examples))
    storage: Any = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    for spec, column in zip(columns, values, strict=True):
        if isinstance(column[0], Tensor):
            torch.stack(column, out=spec.of(memory))
        else:
            spec.of(memory).copy_(torch.tensor(column, dtype=spec.dtype))
    return Packed(memory, tuple(columns), keys)


def _shape_and_type(column: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Of what all examples have in a place; None where that is not the same, or something else."""
    first = column[0]
    if type(first) in _NUMBERS:
        return ((), _NUMBERS[type(first)]) if all(type(each) is type(first) for each in column) else None
    if type(first) is not Tensor or first.layout is not torch.strided or first.device.type != "cpu":
        return None
    shape, dtype = first.shape, first.dtype
    alike = all(
        type(each) is Tensor and each.shape == shape and each.dtype is dtype and not each.requires_grad
        for each in column
    )
    return (tuple(shape), dtype) if alike else None


Collate = Callable[[list[Any]], Any]


class Seeds(NamedTuple):
    """What the random numbers of a micro-batch are made of."""

    of_epoch: Key  # the seed of the run, the source, the epoch
    positions: Indices  # of the examples, in the order of the epoch


Fetch = Callable[..., Any]  # of indices and their Seeds; without any, random numbers are not seeded


@dataclass(frozen=True)
class Loading:
    """How examples are fetched: here, or by worker processes ahead of time."""

    workers: int = 0
    pin_memory: bool = False
    prefetch: int | None = None


class Loader:
    """Fetches micro-batches. Worker processes, where there are any, live until close()."""

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: GlobalBatches,
        collate: Collate | None = None,
        loading: Loading | None = None,
        source: str = "",
    ) -> None:
        """Loaders of another `source` draw other random numbers."""
        self.dataset, self.collate, self.plan, self._source = dataset, collate, plan, source
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
        """Whether worker processes fetch: then asking for a batch early costs this process nothing."""
        return self._loading.workers > 0

    def first(self) -> tuple[MicroBatch, Any]:
        micro = next(iter(self.plan.micro_batches(0)))
        return micro, self._fetch(micro.indices, self._seeds(micro, 0))

    def _from_here(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        pin = self._loading.pin_memory and torch.cuda.is_available()
        for micro in self.plan.micro_batches(epoch, start):
            batch = self._fetch(micro.indices, self._seeds(micro, epoch))
            yield micro, (pinned(batch) if pin else batch)

    def _from_workers(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        asked: deque[MicroBatch] = deque()  # of the workers, and not handed out yet
        self._keys.next_ones = self._asking(epoch, start, asked)
        if self._worker_loader is None:
            self._worker_loader = DataLoader(
                _MicroBatchDataset(batch_fetcher(self.dataset, self.collate, in_worker=True)),
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
        for micro in self.plan.micro_batches(epoch, start):
            asked.append(micro)
            yield micro.indices, self._seeds(micro, epoch)

    def _seeds(self, micro: MicroBatch, epoch: int) -> Seeds:
        assert micro.positions is not None
        return Seeds((self.plan.seed, self._source, epoch), micro.positions)

    def close(self, at_once: bool = False) -> None:
        loader, self._worker_loader = self._worker_loader, None
        if loader is not None:
            workers.end(loader, at_once)


def batch_fetcher(dataset: Dataset[Any], collate: Collate | None = None, in_worker: bool = False) -> Fetch:
    """A function from indices to a batch, by the fastest way that the dataset offers.

    Tensors are indexed at once; a dataset with `__getitems__` is asked for all examples in one call; any other is
    asked for one example at a time, as torch's DataLoader does. In a worker, a batch is packed for its way.
    """
    if isinstance(dataset, Part):
        return partial(_fetch_part, dataset, batch_fetcher(dataset.dataset, collate, in_worker))
    if collate is None and type(dataset) is Subset and type(dataset.dataset) in (TensorDataset, Subset):
        within = np.asarray(dataset.indices, dtype=np.int64)
        within = np.where(within < 0, within + len(dataset.dataset), within)  # type: ignore[arg-type]
        return partial(_fetch_within, within, batch_fetcher(dataset.dataset, None, in_worker))
    if collate is None and type(dataset) is TensorDataset:
        return partial(_fetch_tensors, dataset.tensors)
    return _Examples(dataset, collate, in_worker)


class _Examples:
    """Fetches examples by the dataset's own code, with the random numbers of each seeded by its position.

    Seeding takes longer than fetching a row in memory. So only those generators are seeded that the first batch drew
    from, and a later batch that draws from another one is fetched again with that one seeded, too.
    """

    def __init__(self, dataset: Any, collate: Collate | None, in_worker: bool) -> None:
        self._dataset, self._collate, self._in_worker = dataset, collate, in_worker
        self._together = _fetches_together(dataset)
        self._draws_from: set[str] | None = set() if self._together else None  # None: not known yet

    def __call__(self, indices: Indices, seeds: Seeds | None = None) -> Any:
        numbers = indices.tolist()
        if seeds is None:
            return self._collated(self._all(numbers))
        with generators_kept() as states:
            examples = self._seeded(numbers, seeds, states)
            if self._collate is not None:  # the usual one draws nothing
                seed_by((COLLATING, *seeds.of_epoch, int(seeds.positions[0])))
            return self._collated(examples)

    def _seeded(self, numbers: list[int], seeds: Seeds, states: States) -> Any:
        if self._draws_from is None:
            self._draws_from = set()
            return [self._first(number, key, self._draws_from) for number, key in _keyed(numbers, seeds)]
        while True:
            chosen = self._draws_from
            examples = self._each(numbers, seeds, chosen) if chosen else self._all(numbers)
            others = set(states.moved()) - chosen
            if not others:
                return examples
            self._draws_from = chosen | others

    def _first(self, number: int, key: Key, draws_from: set[str]) -> Any:
        seed_by(key)
        seeded = States.now()
        example = self._dataset[number]
        draws_from.update(seeded.moved())
        return example

    def _each(self, numbers: list[int], seeds: Seeds, generators: set[str]) -> Any:
        found = []
        for number, key in _keyed(numbers, seeds):
            seed_by(key, generators)
            found.append(self._dataset.__getitems__([number]) if self._together else self._dataset[number])
        return self._joined(found) if self._together else found

    def _all(self, numbers: list[int]) -> Any:
        if self._together:
            return self._dataset.__getitems__(numbers)
        return [self._dataset[number] for number in numbers]

    def _joined(self, found: list[Any]) -> Any:
        """What `__getitems__` would have returned for all examples, of what it returned for each of them."""
        kinds = {type(each) for each in found}
        if kinds == {list}:
            return [example for each in found for example in each]
        if kinds == {torch.Tensor}:
            return torch.cat(found)
        name = type(self._dataset).__name__
        raise ConfigError(
            f"{name}.__getitems__ draws random numbers for a whole batch and returns a {type(found[0]).__name__}, so "
            "they would depend on the number of processes. Return a list of examples or a tensor, which can be fetched "
            "one by one, or draw in __getitem__"
        )

    def _collated(self, examples: Any) -> Any:
        return (self._collate or (collate if self._in_worker else default_collate))(examples)


def _keyed(numbers: list[int], seeds: Seeds) -> Iterator[tuple[int, Key]]:
    """Indices, each with the key of its example's random numbers."""
    for number, position in zip(numbers, seeds.positions.tolist(), strict=True):
        yield number, (FETCHING, *seeds.of_epoch, position)


def _fetches_together(dataset: Any) -> bool:
    """Whether a dataset fetches several examples in one call. torch's Subset does so if what it is a part of does."""
    if type(dataset) is Subset:
        return _fetches_together(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _as_it_is(batch: Any) -> Any:
    """In place of what torch would do to a batch from a worker, and not to one that is fetched here."""
    return batch


# Plain functions, not lambdas: worker processes that are spawned receive them pickled.


def _fetch_part(part: Part, fetch: Fetch, indices: Indices, seeds: Seeds | None = None) -> Any:
    return fetch(part.whole(indices), seeds)


def _fetch_within(within: Indices, fetch: Fetch, indices: Indices, seeds: Seeds | None = None) -> Any:
    return fetch(within[indices], seeds)


def _fetch_tensors(tensors: tuple[torch.Tensor, ...], indices: Indices, seeds: Seeds | None = None) -> Any:
    chosen = torch.from_numpy(indices)
    return [tensor.index_select(0, chosen) for tensor in tensors]


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
    """Runs in a worker: fetches a whole micro-batch per request."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[Indices, Seeds]) -> Any:
        return self._fetch(*key)
