"""What a loop trains on: a dataset or a stream, its batches and their order; given so, or by a torch DataLoader."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.data.loader import Collate
from lockstep.data.order import CustomOrder, Order, OrderChoice, Sequential, Shuffled, Weighted, digest
from lockstep.data.seeding import SAMPLING, generators_kept, seed_by
from lockstep.data.stream_reader import is_stream
from lockstep.data.workers import Loading
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_PASSES = 100  # over its data that a sampler may make in an epoch: one that repeats for ever does not end

_taken: weakref.WeakKeyDictionary[DataLoader[Any], tuple[Any, Source]] = weakref.WeakKeyDictionary()
# The generators that samplers draw from, with their states by epoch and the loader that has them.
_generators: dict[int, tuple[torch.Generator, dict[int, torch.Tensor], Any]] = {}


@dataclass(frozen=True)
class Source:
    dataset: Any
    batch_size: int
    collate: Collate | None = None
    shuffle: bool = True
    drop_last: bool = False
    order: OrderChoice = None
    loading: Loading | None = None  # where a DataLoader says how examples are fetched

    @functools.cached_property
    def examples(self) -> Any:
        """The examples of an epoch, to evaluate: all, or those that the sampler of a DataLoader takes."""
        if not isinstance(self.order, Order) or (type(self.order) in (Sequential, Shuffled) and not self.drop_last):
            return self.dataset
        length = self.order.length // self.batch_size * self.batch_size if self.drop_last else self.order.length
        return Subset(self.dataset, self.order.at(0, np.arange(length)).tolist())


def source_of(
    data: Any, batch_size: int | None, collate: Collate | None, shuffle: bool, drop_last: bool, order: OrderChoice,
    seed: int,
) -> Source:  # fmt: skip
    """Returns the source that the arguments of run.batches name."""
    if not makes_batches(data):
        if batch_size is None:
            raise ConfigError(
                "run.batches: batch_size is missing: run.batches(dataset, 64). A DataLoader has its own; without one "
                "(batch_size=None) it is a stream of examples, or run.stream takes the batches that its dataset makes"
            )
        return Source(data, whole_number(batch_size, "batch_size", 1), collate, shuffle, drop_last, order)
    source = taken(data, seed)
    arguments = {"batch_size": batch_size, "collate": collate, "order": order, "drop_last": drop_last or None}
    arguments["shuffle"] = shuffle if not shuffle and type(source.order) is not Sequential else None
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ConfigError(
            f"run.batches: {given[0]} is given, and the DataLoader has its own: leave it out, or give run.batches the "
            "dataset: run.batches(loader.dataset, ...)"
        )
    return source


def whole_number(value: Any, name: str, least: int) -> int:
    """Returns an argument that counts something."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}: must be a whole number of {least} or more, got {value!r}")
    return number


def makes_batches(data: Any) -> bool:
    """Returns whether this is a DataLoader of batches: one of examples is a stream like any other."""
    return isinstance(data, DataLoader) and data.batch_sampler is not None


def taken(loader: DataLoader[Any], seed: int, workers: bool = True) -> Source:
    """Takes what a DataLoader was made with, and logs what that is. Its order becomes a function of the epoch."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"DataLoader: {type(loader).__name__} makes batches in its own way (__iter__), which cannot be divided "
            "over ranks: use a DataLoader of torch, or run.stream with different data on every rank"
        )
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    weights = getattr(sampler, "weights", None)
    count = None if is_stream(loader.dataset) else len(loader.dataset)  # type: ignore[arg-type]
    drawn_by = sampler, None if weights is None else digest(weights)
    made_of = (seed, loader.dataset, count, loader.collate_fn, *drawn_by, workers)
    known = _taken.get(loader)
    if known is None or not all(
        one is other or (isinstance(one, (int, str)) and one == other)
        for one, other in zip(known[0], made_of, strict=True)
    ):
        known = _taken[loader] = made_of, _take(loader, seed, workers)
    return known[1]


def _take(loader: DataLoader[Any], seed: int, workers: bool) -> Source:
    dataset: Any = loader.dataset
    collate: Any = None if loader.collate_fn is default_collate else loader.collate_fn
    batches: Any = loader.batch_sampler
    given = Loading(loader.num_workers, loader.pin_memory, loader.prefetch_factor, loader.persistent_workers)
    loading = given if loader.num_workers else None
    order: Order | None = None
    if is_stream(dataset):
        size, drop_last, name = int(loader.batch_size or 0), loader.drop_last, "the stream"
    elif type(batches) is BatchSampler:
        size, drop_last = batches.batch_size, batches.drop_last
        order, name = _order_of(batches.sampler, loader, len(dataset), seed)
    else:
        samples = _BatchSamples(batches, loader)
        size, drop_last, name = samples.size, False, type(batches).__name__
        order = CustomOrder(len(dataset), seed, samples, repeats=True, said_by=name)
    fetched = f", {loader.num_workers} workers" if loading and workers and order is not None else ""
    logger.info("a DataLoader gives its dataset, batches of %d (on all ranks together), %s as the order%s%s%s", size,
                name, ", its collate_fn" if collate else "", fetched, _not_taken(loader))  # fmt: skip
    return Source(dataset, size, collate, order is not None, drop_last, order, loading)


def _order_of(sampler: Any, loader: DataLoader[Any], count: int, seed: int) -> tuple[Order, str]:
    """Returns the order of a sampler, and how the log names it."""
    name = type(sampler).__name__
    if type(sampler) is SequentialSampler:
        return Sequential(count), name
    if type(sampler) is DistributedSampler:  # which would divide the data once more
        order = Shuffled(count, seed) if sampler.shuffle else Sequential(count)
        return order, f"{order.name} (in place of {name})"
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            f"DataLoader: {name} divides the data over ranks, which Lockstep does: give the DataLoader a sampler over "
            "all of the data"
        )
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count
    if whole and sampler.generator is None:
        return Shuffled(count, seed), f"{name} (by the seed of the run)"
    if type(sampler) is WeightedRandomSampler and sampler.generator is None and len(sampler.weights) == count:
        weighted = Weighted(count, seed, sampler.weights, sampler.replacement, sampler.num_samples)
        return weighted, f"{name} (by the seed of the run)"
    return CustomOrder(count, seed, _Samples(sampler, loader), repeats=True, said_by=name), name


def _not_taken(loader: DataLoader[Any]) -> str:
    left = {
        "worker_init_fn": loader.worker_init_fn is not None,
        "timeout": bool(loader.timeout),
        "multiprocessing_context": loader.multiprocessing_context is not None,
    }
    names = ", ".join(name for name, is_set in left.items() if is_set)
    return f"; not its {names}" if names else ""


class _Samples:
    """A sampler as a function of the epoch. Ranks compare what it returns, and so does a run that resumes.

    One with a generator has in every epoch what the DataLoader itself would have. Others draw from generators that are
    seeded by the seed of the run and the epoch.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any]) -> None:
        self._sampler, self._name = sampler, type(sampler).__name__
        self._most = _MOST_PASSES * max(len(loader.dataset), 1)  # type: ignore[arg-type]
        inner: Any = getattr(sampler, "sampler", None)
        self._generator: Any = getattr(sampler, "generator", None) or getattr(inner, "generator", None)
        # Whether the loader draws the seed of its workers from the same generator, in every epoch or once.
        self._draws_seed = self._generator is not None and loader.generator is self._generator
        self._draws_once = loader.persistent_workers
        if self._generator is not None:
            now = (self._generator, {0: self._generator.get_state()}, weakref.ref(loader))
            _, self._states, other = _generators.setdefault(id(self._generator), now)
            if other() is not loader:
                raise ConfigError(
                    f"DataLoader: the generator of {self._name} belongs to another DataLoader, too, so what it draws "
                    "depends on both: make every DataLoader once, with its own generator"
                )
        elif self(0, 0, 0) != self(0, 0, 0):
            raise ConfigError(
                f"DataLoader: {self._name} has its own random state, so that no other rank and no resumed run could "
                "draw the same: draw from torch's, NumPy's or Python's global generators, or give it `generator`"
            )

    def __call__(self, epoch: int, seed: int, count: int) -> Sequence[int]:
        if self._generator is None:
            with generators_kept():
                seed_by((SAMPLING, seed, epoch))
                return self._drawn(epoch)
        found: Sequence[int] = ()
        for each in range(max(known for known in self._states if known <= epoch), epoch + 1):
            self._generator.set_state(self._states[each])
            if self._draws_seed and not (self._draws_once and each > 0):
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            found = self._drawn(each)
            self._states.setdefault(each + 1, self._generator.get_state())  # the data may have grown since
        return found

    def _drawn(self, epoch: int) -> list[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        found = list(itertools.islice(iter(self._sampler), self._most + 1))
        if len(found) > self._most:
            raise ConfigError(f"DataLoader: {self._name} does not end: an epoch needs an end")
        return found


class _BatchSamples(_Samples):
    """A batch sampler as a function of the epoch: its batches must have one size, but for the last."""

    size = 0

    def __init__(self, sampler: Any, loader: DataLoader[Any]) -> None:
        super().__init__(sampler, loader)
        self(0, 0, 0)

    def _drawn(self, epoch: int) -> list[Any]:
        batches = super()._drawn(epoch)
        sizes = [len(each) for each in batches]
        self.size = self.size or (sizes[0] if sizes else 0)
        other = [each for each in sizes[:-1] if each != self.size]
        if not sizes or other or sizes[-1] > self.size:
            raise ConfigError(
                f"DataLoader: {self._name} makes batches of {self.size} and of "
                f"{other[0] if other else sizes[-1] if sizes else 0} examples; run.batches needs one size. For batches "
                "of similar lengths use order={'type': 'buckets', 'lengths': ...} with the dataset"
            )
        return [index for batch in batches for index in batch]
