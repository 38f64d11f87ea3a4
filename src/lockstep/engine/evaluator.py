"""Evaluates the models of a run over datasets and streams, on all ranks or on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.data.batches import MicroBatch
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.stream_batches import counted
from lockstep.data.stream_reader import check_stream, is_stream
from lockstep.distributed.group import Group
from lockstep.engine.batch_feed import BatchFeed
from lockstep.engine.ema import PREFIX, Average, measured_beside
from lockstep.engine.exchange import gather_to_rank_0
from lockstep.engine.models import Models
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import ConfigError
from lockstep.evaluation.epoch_metrics import Collected, EpochMetrics, epoch_metrics_of, require_other_names
from lockstep.evaluation.means import Measure, combine, evaluating, measure_sums, sums_of
from lockstep.runtime.base import Runtime, generator_states, seed_generators, set_generator_states
from lockstep.strategy import compiled
from lockstep.strategy.base import Strategy

_EVALUATING = 2**31  # takes the place of a step in the seed of a leaf


class _GivenUp(Exception):
    """This rank was asked to leave during an evaluation."""


class Evaluator:
    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        models: Models,
        feed: BatchFeed,
        checkpointer: Checkpointer,
        requests: StopRequests,
    ) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy
        self._models, self._feed, self._checkpointer, self._requests = models, feed, checkpointer, requests

    @property
    def _averages(self) -> list[Average]:
        """The weight averages that are measured beside the weights."""
        return [each for each in self._models.averages if each.settings.measured]

    def evaluate(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, on: str, collate: Collate | None, name: str
    ) -> dict[str, float]:
        found = self._evaluate(measure, dataset, batch_size, on, collate, name, lambda: False)
        assert found is not None
        return found

    def evaluate_or_leave(
        self,
        measure: Measure,
        datasets: Mapping[str, Dataset[Any]],
        batch_size: int,
        on: str,
        collate: Collate | None,
    ) -> dict[str, dict[str, Any]] | None:
        """Evaluates datasets by what each is evaluated for, with the weights and with their averages.

        Returns None on all ranks as soon as one of them is asked to leave.
        """
        leaves = (lambda: False) if self._strategy.measures_together else self._asked_to_leave

        def measured() -> dict[str, dict[str, Any]] | None:
            states = generator_states(self._runtime)
            found = {}
            for name, dataset in datasets.items():
                one = self._evaluate(measure, dataset, batch_size, on, collate, name, leaves)
                if one is None:  # a resumed run begins with the first of them, and draws the same numbers
                    set_generator_states(self._runtime, states)
                    return None
                found[name] = one
            return found

        return measured_beside(self._averages, self._runtime, measured)

    def _asked_to_leave(self) -> bool:
        return self._requests.leave is not None

    def _evaluate(
        self,
        measure: Measure,
        dataset: Dataset[Any],
        batch_size: int,
        on: str,
        collate: Collate | None,
        name: str,
        leaves: Callable[[], bool],
    ) -> dict[str, Any] | None:
        if on not in ("all", "rank0"):
            raise ConfigError(f"run.evaluate: on must be all or rank0, got {on!r}")
        together = self._strategy.measures_together
        alone = on == "rank0" and not together
        count, micros, compare = self._micro_batches(dataset, batch_size, collate, alone, name)
        self._checkpointer.equalize_buffers()
        whole = epoch_metrics_of(measure)
        collected: list[Collected] = []

        def here() -> Any:
            collected[:] = [whole.begin(name)] if whole is not None else []

            def collect(micro: MicroBatch, batch: Any) -> None:
                for each in collected:
                    each.take(micro, measure.outputs(batch))  # type: ignore[attr-defined]

            with evaluating(self._models.modules.values()), contextlib.suppress(_GivenUp):
                move = self._next_of(name, leaves)
                found = measure_sums(measure, micros(), move, self._runtime.end_of_program, together, collect)
                return found if self._strategy.is_dp_leader else ({}, 0)

        parts = [self._group.agree(here, f"{name} on rank 0")] if alone else self._group.gather(here(), name)
        if None in parts:
            return None
        compare()
        if count is None and not any(seen for _, seen in parts):
            raise ConfigError(f"{name}: {type(dataset).__name__} has no examples: there is nothing to measure")
        means = combine(parts, count, name)
        return means if whole is None else {**means, **self._epoch_metrics(whole, collected, means, alone, name)}

    def _micro_batches(
        self, dataset: Any, batch_size: int, collate: Collate | None, alone: bool, name: str
    ) -> tuple[int | None, Callable[[], Iterable[tuple[MicroBatch, Any]]], Callable[[], None]]:
        """Returns the number of examples, if known; this rank's micro-batches; and a check to make after them."""
        if not is_stream(dataset):
            count = check_dataset(dataset, name)
            loader = self._feed.loaders.for_evaluation(dataset, batch_size, collate, alone=alone)
            return count, lambda: self._seeded(loader.epoch(0)), lambda: None
        check_stream(dataset, name)
        walk = self._feed.streams.evaluating(dataset, batch_size, collate, alone)
        together = self._strategy.measures_together
        compares = not (alone or together)
        return (
            None,
            lambda: walk.in_step(self._group) if together else walk.micro_batches(),
            lambda: walk.compare(self._group) if compares else None,
        )

    def _seeded(self, micros: Iterable[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """With train.exact, gives every leaf its own random numbers, whichever rank computes it."""
        if not self._strategy.leaves:
            yield from micros
            return
        states = generator_states(self._runtime)
        try:
            for micro, batch in micros:
                seed_generators(self._runtime, self._feed.seed, _EVALUATING, micro.batch, micro.leaf)
                yield micro, batch
        finally:
            set_generator_states(self._runtime, states)

    def _epoch_metrics(
        self, whole: EpochMetrics, collected: list[Collected], means: Mapping[str, Any], alone: bool, name: str
    ) -> dict[str, Any]:
        """Computes metrics of a whole set on rank 0, from what all ranks have collected."""
        parts = [each.part() for each in collected]
        if not alone:
            parts = gather_to_rank_0(self._group, parts[0], self._strategy.is_dp_leader, f"the outputs of {name}")

        def compute() -> dict[str, Any]:
            values = whole.computed(parts)
            require_other_names(values, means)
            return values

        values: dict[str, Any] = self._group.agree(compute, f"the whole-set metrics of {name}")

        def more() -> Any:
            return whole.finish({**means, **values}, alone)

        found = self._group.agree(more, f"the end of {name} on rank 0") if alone else more()
        require_other_names(found, {**means, **values})
        return {**values, **found}

    def evaluate_stream(
        self, measure: Measure, batches: Iterator[Any], count: Callable[[Any], int], expected: int | None, name: str
    ) -> dict[str, float]:
        self._checkpointer.equalize_buffers()
        with evaluating(self._models.modules.values()):
            mine = sums_of(measure, counted(batches, count), self._next_of(name), self._runtime.end_of_program)
        parts = self._group.gather(mine, name)
        return combine(parts, expected, name)

    def names_of(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, collate: Collate | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Returns what `evaluate_or_leave` finds by name, measured on one batch without any trace (no generator moves
        on), and whether that is all: a metric of a whole set may have no value for so few examples."""
        states = generator_states(self._runtime)
        alone = self._group.world_size == 1
        if is_stream(dataset):
            check_stream(dataset, "the data to measure")
            micro, batch = self._feed.streams.evaluating(dataset, batch_size, collate, alone).first()
        else:
            micro, batch = self._feed.loaders.for_evaluation(dataset, batch_size, collate, alone=alone).first()
        whole = epoch_metrics_of(measure)
        tried: list[dict[str, Any] | None] = []

        def measured(moved: Any) -> Mapping[str, Any]:
            found = measure(moved)
            if whole is not None:
                outputs = measure.outputs(moved)  # type: ignore[attr-defined]
                whole.check(outputs, len(micro.indices))
                rows = np.unique(micro.indices, return_index=True)[1]
                tried.append(whole.tried(whole.real(outputs, rows, len(micro.indices))))
            return found

        with evaluating(self._models.modules.values()):
            found, _ = sums_of(measured, [(micro.examples or 1, len(micro.indices), batch)], self._strategy.move)
        self._runtime.end_of_program()
        set_generator_states(self._runtime, states)
        values = next((each for each in tried if each is not None), {})
        require_other_names(values, found)
        names = {**dict.fromkeys(found, 0.0), **values}
        averaged = {PREFIX + name: value for name, value in names.items()} if self._averages else {}
        return names | averaged, None not in tried

    def _next_of(self, name: str, leaves: Callable[[], bool] = lambda: False) -> Callable[[Any], Any]:
        """Returns what moves a batch to the device and counts as progress."""

        def move(batch: Any) -> Any:
            if leaves():
                raise _GivenUp
            self._group.activity.enter(name)
            compiled.next_pass()
            return self._strategy.move(batch)

        return move
