"""Fetches a rank's micro-batches of a dataset: here, or by worker processes ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lockstep.config.training import Data
from lockstep.data import workers
from lockstep.data.batches import GlobalBatches, MicroBatch, Position
from lockstep.data.permutation import Indices, Part
from lockstep.data.seeding import COLLATING, FETCHING, Key, States, generators_kept, seed_by
from lockstep.data.workers import Loading, Packed, collate_packed
from lockstep.distributed.from_worker import FromWorker
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import pinned

Collate = Callable[[list[Any]], Any]

# Datasets that are evaluated come and go; the loaders of so many are kept.
_KEPT_FOR_EVALUATION = 4
_SHOWN = 32  # examples in a message


class Seeds(NamedTuple):
    """What the random numbers of a micro-batch are seeded by."""

    of_epoch: Key  # the seed of the run, the source, the epoch
    positions: Indices  # of the examples, in the order of the epoch


class Loader:
    """Fetches micro-batches. Worker processes, where there are any, end with the pass or live until close()."""

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
        self._loading, self._fetch = loading or Loading(), BatchFetcher(dataset, collate)
        self._keys: Iterator[Any] = iter(())  # what the workers are to fetch next
        self._open: list[DataLoader[Any]] = []  # those whose workers run

    def epoch(self, epoch: int, start: int | Position = 0) -> Iterator[tuple[MicroBatch, Any]]:
        """Yields the micro-batches of a pass over the dataset as it is then: loops change it between two passes."""
        self._fetch.within.clear()
        micros = ((micro, self._seeds(micro, epoch)) for micro in self.plan.micro_batches(epoch, start))
        return self._from_workers(micros) if self._loading.workers else self._from_here(micros)

    @property
    def fetches_ahead(self) -> bool:
        """Whether worker processes fetch: then asking for a batch early costs this process nothing."""
        return self._loading.workers > 0

    def first(self) -> tuple[MicroBatch, Any]:
        self._fetch.within.clear()
        micro = next(iter(self.plan.micro_batches(0)))
        return micro, self._fetch(micro.indices, self._seeds(micro, 0))

    def _from_here(self, micros: Iterator[tuple[MicroBatch, Seeds]]) -> Iterator[tuple[MicroBatch, Any]]:
        pin = self._loading.pin_memory and torch.cuda.is_available()
        for micro, seeds in micros:
            batch = self._fetch(micro.indices, seeds)
            yield micro, (pinned(batch) if pin else batch)

    def _from_workers(self, micros: Iterator[tuple[MicroBatch, Seeds]]) -> Iterator[tuple[MicroBatch, Any]]:
        asked: deque[MicroBatch] = deque()  # of the workers, and not handed out yet

        def asking() -> Iterator[Any]:
            for micro, seeds in micros:
                asked.append(micro)
                yield micro.indices, seeds

        self._keys = asking()
        if not (self._loading.persistent and self._open):
            fetcher = BatchFetcher(self.dataset, self.collate, in_worker=True)
            self._open.append(workers.loader(fetcher, self._loading, sampler=self))
        loader = self._open[-1]
        try:
            for batch in workers.fetched(loader, type(self.dataset).__name__):
                yield asked.popleft(), batch.unpacked() if isinstance(batch, Packed) else batch
            assert not asked, f"the workers did not fetch {len(asked)} micro-batches"
        finally:
            if not self._loading.persistent:
                self._open = [each for each in self._open if each is not loader]
                workers.end(loader, at_once=False)

    def __iter__(self) -> Iterator[Any]:
        """Yields what workers fetch in the next pass: this is the sampler of their DataLoader."""
        return self._keys

    def _seeds(self, micro: MicroBatch, epoch: int) -> Seeds:
        assert micro.positions is not None
        return Seeds((self.plan.seed, self._source, epoch), micro.positions)

    def close(self, at_once: bool = False) -> None:
        while self._open:
            workers.end(self._open.pop(), at_once)


class BatchFetcher(Dataset[Any]):
    """Fetches batches by the fastest way that the dataset offers.

    Tensors are indexed at once; a dataset with `__getitems__` is asked for all examples in one call; any other is asked
    for one example at a time, as torch's DataLoader does, with the random numbers of each seeded by its position.

    Seeding takes longer than fetching a row in memory. So only those generators are seeded that the first batch drew
    from, and a later batch that draws from another one is fetched again with that one seeded, too.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, in_worker: bool = False) -> None:
        self._whole, self._collate, self._in_worker = dataset, collate, in_worker
        self._draws_from: set[str] | None = None  # not known yet
        self.within: dict[int, Indices] = {}  # of the subsets of this pass

    def __call__(self, indices: Indices, seeds: Seeds | None = None) -> Any:
        """Returns a batch; without seeds, random numbers are not seeded."""
        dataset: Any = self._whole
        while isinstance(dataset, Part):
            indices, dataset = dataset.whole(indices), dataset.dataset
        if self._collate is None:
            while type(dataset) is Subset and type(dataset.dataset) in (TensorDataset, Subset):
                if id(dataset) not in self.within:
                    found = np.asarray(dataset.indices, dtype=np.int64)
                    self.within[id(dataset)] = np.where(found < 0, found + len(dataset.dataset), found)  # type: ignore[arg-type]
                indices, dataset = self.within[id(dataset)][indices], dataset.dataset
            if type(dataset) is TensorDataset:
                chosen = torch.from_numpy(indices)
                return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in dataset.tensors]
        self._dataset, self._together = dataset, _fetches_together(dataset)
        numbers = indices.tolist()
        if seeds is None:
            return self._collated(self._all(numbers), numbers)
        with generators_kept() as states:
            examples = self._seeded(numbers, seeds, states)
            if self._collate is not None:  # the usual one draws nothing
                seed_by((COLLATING, *seeds.of_epoch, int(seeds.positions[0])))
            return self._collated(examples, numbers)

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        """For a worker: returns an error in place of the batch."""
        try:
            return self(*key)
        except Exception as error:
            return FromWorker.of(error)

    def _seeded(self, numbers: list[int], seeds: Seeds, states: States) -> Any:
        if self._draws_from is None and not self._together:
            self._draws_from = set()
            return [self._first(number, key, self._draws_from) for number, key in _keyed(numbers, seeds)]
        while True:
            chosen = self._draws_from or set()
            examples = self._each(numbers, seeds, chosen) if chosen else self._all(numbers)
            others = set(states.moved()) - chosen
            if not others:
                return examples
            self._draws_from = chosen | others

    def _first(self, number: int, key: Key, draws_from: set[str]) -> Any:
        seed_by(key)
        seeded = States.now()
        example = self._one(number)
        draws_from.update(seeded.moved())
        return example

    def _each(self, numbers: list[int], seeds: Seeds, generators: set[str]) -> Any:
        found = []
        for number, key in _keyed(numbers, seeds):
            seed_by(key, generators)
            found.append(self._all([number]) if self._together else self._one(number))
        return self._joined(found) if self._together else found

    def _all(self, numbers: list[int]) -> Any:
        if not self._together:
            return [self._one(number) for number in numbers]
        try:
            return self._dataset.__getitems__(numbers)
        except Exception as error:
            error.add_note(f"fetching {_named(self._dataset, numbers)}")
            raise

    def _one(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except Exception as error:
            error.add_note(f"fetching {_named(self._dataset, [number])}")
            raise

    def _joined(self, found: list[Any]) -> Any:
        """Returns what `__getitems__` would have returned for all examples, from what it returned for each."""
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

    def _collated(self, examples: Any, numbers: list[int]) -> Any:
        try:
            return (self._collate or (collate_packed if self._in_worker else default_collate))(examples)
        except Exception as error:
            hint = "" if self._collate else ": without a collate function they must have the same shape"
            error.add_note(f"collating {_named(self._dataset, numbers)}{hint}")
            if none := [number for number, example in zip(numbers, examples, strict=False) if example is None]:
                error.add_note(f"{_named(self._dataset, none)} is None: __getitem__ must return an example")
            raise


def _named(dataset: Any, numbers: list[int]) -> str:
    """Returns the examples by the numbers that the dataset under any Subset has for them."""
    while type(dataset) is Subset:
        dataset, numbers = dataset.dataset, [int(dataset.indices[number]) for number in numbers]
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (f", ... ({len(numbers)} in all)" if len(numbers) > _SHOWN else "")
    return f"example{'s' * (len(numbers) > 1)} {shown} of {type(dataset).__name__}"


def _keyed(numbers: list[int], seeds: Seeds) -> Iterator[tuple[int, Key]]:
    for number, position in zip(numbers, seeds.positions.tolist(), strict=True):
        yield number, (FETCHING, *seeds.of_epoch, position)


def _fetches_together(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _fetches_together(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def check_dataset(dataset: Any, name: str) -> int:
    """Returns the number of examples; refuses what is not map-style or is empty."""
    if (
        isinstance(dataset, (IterableDataset, type))
        or not hasattr(dataset, "__len__")
        or not hasattr(dataset, "__getitem__")
    ):
        raise ConfigError(
            f"{name} must be a map-style dataset (with __len__ and __getitem__) or a stream (with __iter__), "
            f"got {type(dataset).__name__}"
        )
    count = len(dataset)
    if count == 0:
        raise ConfigError(f"{name} is a dataset of length 0: it needs examples")
    return count


class Loaders:
    """The loaders of one rank, kept with their worker processes until others take their place."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        seed: int,
        settings: Data,
        runtime: Runtime,
        multiple: int,
        leaves: int | None = None,
    ) -> None:
        self._rank, self._world_size, self._seed, self._leaves = rank, world_size, seed, leaves
        self._fill, self._multiple = runtime.fixed_shapes, multiple
        pin = runtime.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        self.loading = Loading(settings.workers, pin, settings.prefetch, settings.persistent_workers)
        self._training: dict[str, Loader] = {}
        self._evaluating: dict[tuple[int, int, bool], Loader] = {}

    def plan(
        self, dataset: Dataset[Any], batch_size: int, *, alone: bool = False, accumulate: int = 1, **how: Any
    ) -> GlobalBatches:
        """Returns how this rank takes its slices of a dataset; all of it, where the rank walks it alone."""
        rank, world_size = (0, 1) if alone else (self._rank, self._world_size)
        count = check_dataset(dataset, "the dataset")
        return GlobalBatches(
            count, batch_size, rank, world_size, self._seed, accumulate=accumulate, fill=self._fill,
            multiple=self._multiple, leaves=self._leaves, **how,
        )  # fmt: skip

    def for_training(
        self,
        source: str,
        dataset: Dataset[Any],
        plan: GlobalBatches,
        collate: Collate | None,
        loading: Loading | None = None,
    ) -> Loader:
        """Returns the one loader of a source; another collate function needs a new one, another plan does not."""
        known = self._training.get(source)
        if known is None or (known.dataset is not dataset) or known.collate != collate:
            if known is not None:
                known.close()
            known = self._training[source] = Loader(dataset, plan, collate, loading or self.loading, source)
        known.plan = plan
        return known

    def for_evaluation(
        self, dataset: Dataset[Any], batch_size: int, collate: Collate | None, *, alone: bool = False
    ) -> Loader:
        """Returns a loader apart from those of training: the same data may be evaluated in the middle of an epoch."""
        plan = self.plan(dataset, batch_size, alone=alone, shuffle=False)
        # A loader holds on to its dataset, so that no other one can come to have the same id.
        key = (id(dataset), batch_size, alone)
        known = self._evaluating.pop(key, None)
        if known is None or known.collate != collate:
            if known is not None:
                known.close()
            known = Loader(dataset, plan, collate, self.loading)
        known.plan = plan
        self._evaluating[key] = known
        while len(self._evaluating) > _KEPT_FOR_EVALUATION:
            self._evaluating.pop(next(iter(self._evaluating))).close()
        return known

    def release(self, sources: list[str]) -> None:
        """Closes the loaders of these sources, and those for evaluation: a loader keeps its dataset alive."""
        for name in sources:
            if (loader := self._training.pop(name, None)) is not None:
                loader.close()
        for loader in self._evaluating.values():
            loader.close()
        self._evaluating.clear()

    def close(self, at_once: bool = False) -> None:
        for loader in [*self._training.values(), *self._evaluating.values()]:
            loader.close(at_once)


def one_ahead(
    micros: Iterator[tuple[MicroBatch, Any]], begin: Callable[[Any], Any]
) -> Iterator[tuple[MicroBatch, Any]]:
    """Yields the same micro-batches, the next one begun already: its copy to the device overlaps with a step.

    The first is handed out as soon as it is there. No batch counts before its step is done, so that one which was begun
    and not handed out is fetched again after a restart.
    """
    first = next(micros, None)
    if first is None:
        return
    yield first[0], begin(first[1])
    begun = ((micro, begin(batch)) for micro, batch in micros)
    coming = next(begun, None)
    while coming is not None:
        ready, coming = coming, next(begun, None)
        yield ready
