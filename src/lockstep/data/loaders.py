"""The loaders of a run, kept from epoch to epoch: one for every source that is trained on, a few for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.training import Data
from lockstep.data.loader import Collate, Loader, Loading, check_dataset
from lockstep.data.order import GlobalBatches, MicroBatch
from lockstep.runtime.base import Runtime

# Datasets that are evaluated come and go; the loaders of so many are kept.
_KEPT_FOR_EVALUATION = 4


class Loaders:
    """Makes loaders for one rank, and keeps them with their worker processes until others take their place."""

    def __init__(self, rank: int, world_size: int, seed: int, settings: Data, runtime: Runtime, multiple: int) -> None:
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._fill, self._multiple = runtime.fixed_shapes, multiple
        pin = runtime.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        self.loading = Loading(settings.workers, pin, settings.prefetch)
        self._training: dict[str, Loader] = {}
        self._evaluating: dict[tuple[int, int, bool], Loader] = {}

    def plan(
        self, dataset: Dataset[Any], batch_size: int, *, alone: bool = False, accumulate: int = 1, **how: Any
    ) -> GlobalBatches:
        """How this rank takes its share of a dataset; all of it, where the rank walks it alone."""
        rank, world_size = (0, 1) if alone else (self._rank, self._world_size)
        count = check_dataset(dataset, "the dataset")
        return GlobalBatches(
            count, batch_size, rank, world_size, self._seed, accumulate=accumulate, fill=self._fill,
            multiple=self._multiple, **how,
        )  # fmt: skip

    def for_training(self, source: str, dataset: Dataset[Any], plan: GlobalBatches, collate: Collate | None) -> Loader:
        """The one loader of a source. Another function to collate by (a new lambda) takes the place of the last.

        Another plan is no other loader: its workers fetch what they are asked for.
        """
        known = self._training.get(source)
        if known is None or (known.dataset is not dataset) or known.collate != collate:
            if known is not None:
                known.close()
            known = self._training[source] = Loader(dataset, plan, collate, self.loading, source)
        known.plan = plan
        return known

    def for_evaluation(
        self, dataset: Dataset[Any], batch_size: int, collate: Collate | None, *, alone: bool = False
    ) -> Loader:
        """Apart from the loaders of training: the same data may be evaluated in the midst of an epoch."""
        # A loader holds on to its dataset, so that no other one can come to have the same id.
        key = (id(dataset), batch_size, alone)
        known = self._evaluating.pop(key, None)
        if known is None or known.collate != collate:
            if known is not None:
                known.close()
            known = Loader(dataset, self.plan(dataset, batch_size, alone=alone, shuffle=False), collate, self.loading)
        self._evaluating[key] = known
        while len(self._evaluating) > _KEPT_FOR_EVALUATION:
            self._evaluating.pop(next(iter(self._evaluating))).close()
        return known

    def release(self, sources: list[str]) -> None:
        """Close the loaders of these sources, and those for evaluation: a loader keeps its dataset alive."""
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
    """The same micro-batches, each begun when the one before it is handed out: its copy goes on during that step.

    The first is handed out as soon as it is there. Nobody counts a batch before its step is done, so that one which was
    begun and not handed out is fetched again after a restart.
    """
    first = next(micros, None)
    if first is None:
        return
    yield first[0], begin(first[1])
    coming: tuple[MicroBatch, Any] | None = None
    for micro, batch in micros:
        begun = micro, begin(batch)
        if coming is not None:
            yield coming
        coming = begun
    if coming is not None:
        yield coming
