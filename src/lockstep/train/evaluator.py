"""Evaluates the models of a run over datasets and streams, on all ranks or on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.sources import check_stream, is_stream
from lockstep.data.stream import counted
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.runtime.generators import generator_states, set_generator_states
from lockstep.strategy.base import Strategy
from lockstep.train.evaluation import Measure, combine, evaluating, measure_sums, sums_of
from lockstep.train.feed import Feed
from lockstep.train.models import Models


class _GivenUp(Exception):
    """This rank was asked to leave in the midst of an evaluation."""


class Evaluator:
    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        models: Models,
        feed: Feed,
        checkpointer: Checkpointer,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        """`leaves` says whether this rank was asked to save and leave."""
        self._group, self._runtime, self._strategy = group, runtime, strategy
        self._models, self._feed, self._checkpointer, self._leaves = models, feed, checkpointer, leaves

    def evaluate(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, on: str, collate: Collate | None, name: str
    ) -> dict[str, float]:
        found = self._evaluate(measure, dataset, batch_size, on, collate, name, lambda: False)
        assert found is not None
        return found

    def evaluate_or_leave(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, on: str, collate: Collate | None, name: str
    ) -> dict[str, float] | None:
        """The same, given up as soon as a rank is asked to leave: then None, on all of them."""
        leaves = (lambda: False) if self._strategy.measures_together else self._leaves
        states = generator_states(self._runtime)
        found = self._evaluate(measure, dataset, batch_size, on, collate, name, leaves)
        if found is None:  # whoever begins anew draws the same numbers
            set_generator_states(self._runtime, states)
        return found

    def _evaluate(
        self,
        measure: Measure,
        dataset: Dataset[Any],
        batch_size: int,
        on: str,
        collate: Collate | None,
        name: str,
        leaves: Callable[[], bool],
    ) -> dict[str, float] | None:
        together = self._strategy.measures_together
        alone = on == "rank0" and not together
        count, measured, compare = self._measuring(measure, dataset, batch_size, collate, alone, name)
        self._checkpointer.equalize_buffers()

        def here() -> Any:
            with evaluating(self._models.modules.values()), contextlib.suppress(_GivenUp):
                move = self._next_of(name, leaves)
                found = measured(move)
                return found if self._strategy.speaks else ({}, 0)

        parts = [self._group.agree(here, f"{name} on rank 0")] if alone else self._group.gather(here(), name)
        if None in parts:
            return None
        compare()
        if count is None and not any(seen for _, seen in parts):
            raise ConfigError(f"{name}: {type(dataset).__name__} has no examples: there is nothing to measure")
        return combine(parts, count, name)

    def _measuring(
        self, measure: Measure, dataset: Any, batch_size: int, collate: Collate | None, alone: bool, name: str
    ) -> tuple[int | None, Callable[[Callable[[Any], Any]], Any], Callable[[], None]]:
        """How many examples there are, where that is known; what measures this rank's; and what to make sure of once
        all ranks have measured theirs."""
        ended, together = self._runtime.end_of_program, self._strategy.measures_together
        if not is_stream(dataset):
            count = check_dataset(dataset, name)
            loader = self._feed.for_evaluation(dataset, batch_size, collate, alone=alone)
            return count, lambda move: measure_sums(measure, loader, move, ended, together), lambda: None
        check_stream(dataset, name)
        walk = self._feed.evaluation_of_stream(dataset, batch_size, collate, alone)

        def measured(move: Callable[[Any], Any]) -> Any:
            micros = walk.in_step(self._group) if together else walk.micro_batches()
            parts = ((micro.examples, len(micro.indices), batch) for micro, batch in micros)
            return sums_of(measure, parts, move, ended, together)

        compares = not (alone or together)
        return None, measured, lambda: walk.compare(self._group) if compares else None

    def evaluate_stream(
        self, measure: Measure, batches: Iterator[Any], count: Callable[[Any], int], expected: int | None, name: str
    ) -> dict[str, float]:
        self._checkpointer.equalize_buffers()
        with evaluating(self._models.modules.values()):
            mine = sums_of(measure, counted(batches, count), self._next_of(name), self._runtime.end_of_program)
        parts = self._group.gather(mine, name)
        return combine(parts, expected, name)

    def names_of(self, measure: Measure, dataset: Dataset[Any], batch_size: int, collate: Collate | None) -> list[str]:
        """The names of what `measure` returns, found on one batch that leaves no trace: no generator moves on."""
        states = generator_states(self._runtime)
        alone = self._group.world_size == 1
        if is_stream(dataset):
            check_stream(dataset, "the data to measure")
            micro, batch = self._feed.evaluation_of_stream(dataset, batch_size, collate, alone).first()
        else:
            micro, batch = self._feed.for_evaluation(dataset, batch_size, collate, alone=alone).first()
        with evaluating(self._models.modules.values()):
            found, _ = sums_of(measure, [(micro.examples or 1, len(micro.indices), batch)], self._strategy.move)
        self._runtime.end_of_program()
        set_generator_states(self._runtime, states)
        return list(found)

    def _next_of(self, name: str, leaves: Callable[[], bool] = lambda: False) -> Callable[[Any], Any]:
        """Moves a batch to the device, and counts it as progress of whatever the batches are for."""

        def move(batch: Any) -> Any:
            if leaves():
                raise _GivenUp
            self._group.activity.enter(name)
            return self._strategy.move(batch)

        return move
