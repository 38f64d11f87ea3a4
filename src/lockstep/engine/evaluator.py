"""Evaluates the models of a run over datasets and streams, on all ranks or on one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch.utils.data import Dataset

from lockstep.checkpoint import codec
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.data.batches import MicroBatch
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.stream_batches import counted
from lockstep.data.stream_reader import check_stream, is_stream
from lockstep.distributed.group import Group
from lockstep.engine.batch_feed import BatchFeed
from lockstep.engine.models import Models
from lockstep.errors import ConfigError
from lockstep.evaluation.epoch_metrics import Collected, WholeSet, require_other_names, whole_set_of
from lockstep.evaluation.means import Measure, combine, evaluating, measure_sums, sums_of
from lockstep.runtime.base import Runtime, generator_states, set_generator_states
from lockstep.strategy import compiled
from lockstep.strategy.base import Strategy


class _GivenUp(Exception):
    """This rank was asked to leave in the midst of an evaluation."""


class Evaluator:
    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        models: Models,
        feed: BatchFeed,
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
        self,
        measure: Measure,
        datasets: Mapping[str, Dataset[Any]],
        batch_size: int,
        on: str,
        collate: Collate | None,
    ) -> dict[str, dict[str, Any]] | None:
        """The same for several datasets, by what each is evaluated for; given up as soon as a rank is asked to leave:
        then None, on all of them."""
        leaves = (lambda: False) if self._strategy.measures_together else self._leaves
        states = generator_states(self._runtime)
        found = {}
        for name, dataset in datasets.items():
            one = self._evaluate(measure, dataset, batch_size, on, collate, name, leaves)
            if one is None:  # whoever begins anew, with the first of them, draws the same numbers
                set_generator_states(self._runtime, states)
                return None
            found[name] = one
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
    ) -> dict[str, Any] | None:
        together = self._strategy.measures_together
        alone = on == "rank0" and not together
        count, micros, compare = self._micro_batches(dataset, batch_size, collate, alone, name)
        self._checkpointer.equalize_buffers()
        whole = whole_set_of(measure)
        collected: list[Collected] = []

        def here() -> Any:
            collected[:] = [whole.begin()] if whole is not None else []

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
        return means if whole is None else {**means, **self._of_whole_set(whole, collected, means, alone, name)}

    def _micro_batches(
        self, dataset: Any, batch_size: int, collate: Collate | None, alone: bool, name: str
    ) -> tuple[int | None, Callable[[], Iterable[tuple[MicroBatch, Any]]], Callable[[], None]]:
        """How many examples there are, where that is known; this rank's micro-batches; and what to make sure of once
        all ranks have measured theirs."""
        if not is_stream(dataset):
            count = check_dataset(dataset, name)
            loader = self._feed.for_evaluation(dataset, batch_size, collate, alone=alone)
            return count, lambda: loader.epoch(0), lambda: None
        check_stream(dataset, name)
        walk = self._feed.evaluation_of_stream(dataset, batch_size, collate, alone)
        together = self._strategy.measures_together
        compares = not (alone or together)
        return (
            None,
            lambda: walk.in_step(self._group) if together else walk.micro_batches(),
            lambda: walk.compare(self._group) if compares else None,
        )

    def _of_whole_set(
        self, whole: WholeSet, collected: list[Collected], means: Mapping[str, Any], alone: bool, name: str
    ) -> dict[str, Any]:
        """The metrics of a whole set, computed on rank 0 from what all ranks have collected."""
        parts = [each.part() for each in collected]
        if not alone:
            parts = at_rank_zero(self._group, parts[0], self._strategy.is_dp_leader, f"the outputs of {name}")

        def compute() -> dict[str, Any]:
            values = whole.computed(parts)
            require_other_names(values, means)
            return values

        values: dict[str, Any] = self._group.agree(compute, f"the whole-set metrics of {name}")
        return values

    def evaluate_stream(
        self, measure: Measure, batches: Iterator[Any], count: Callable[[Any], int], expected: int | None, name: str
    ) -> dict[str, float]:
        self._checkpointer.equalize_buffers()
        with evaluating(self._models.modules.values()):
            mine = sums_of(measure, counted(batches, count), self._next_of(name), self._runtime.end_of_program)
        parts = self._group.gather(mine, name)
        return combine(parts, expected, name)

    def names_of(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, collate: Collate | None
    ) -> tuple[dict[str, Any], bool]:
        """What `measure` finds by name on one batch that leaves no trace (no generator moves on), and whether that is
        all: a metric of a whole set may have no value for so few examples."""
        states = generator_states(self._runtime)
        alone = self._group.world_size == 1
        if is_stream(dataset):
            check_stream(dataset, "the data to measure")
            micro, batch = self._feed.evaluation_of_stream(dataset, batch_size, collate, alone).first()
        else:
            micro, batch = self._feed.for_evaluation(dataset, batch_size, collate, alone=alone).first()
        whole = whole_set_of(measure)
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
        return {**dict.fromkeys(found, 0.0), **values}, None not in tried

    def _next_of(self, name: str, leaves: Callable[[], bool] = lambda: False) -> Callable[[Any], Any]:
        """Moves a batch to the device, and counts it as progress of whatever the batches are for."""

        def move(batch: Any) -> Any:
            if leaves():
                raise _GivenUp
            self._group.activity.enter(name)
            compiled.next_pass()
            return self._strategy.move(batch)

        return move


# So much is sent at once: the limit of a wait is for a piece, not for all that a rank has.
_PIECE_BYTES = 64 * 2**20
_LENGTH_BYTES = 8


def at_rank_zero(group: Group, value: Any, is_dp_leader: bool, name: str) -> list[Any]:
    """On rank 0 the values of all ranks that speak, in rank order; nothing on the others.

    Every rank must call it. Values are what a checkpoint could hold: no pickles travel.
    """
    if group.world_size == 1:
        return [value]
    mine = _encoded(value) if is_dp_leader and group.rank != 0 else b""
    sizes = group.gather(len(mine), f"how much of {name} every rank has")
    if group.rank == 0:
        received = [_decoded(_receive(group, rank, size, name)) for rank, size in enumerate(sizes) if size]
        return [value, *received] if is_dp_leader else received
    for start in range(0, len(mine), _PIECE_BYTES):
        piece = bytearray(mine[start : start + _PIECE_BYTES])
        group.send(torch.frombuffer(piece, dtype=torch.uint8), 0, f"{name} of rank {group.rank}")
    return []


def _receive(group: Group, rank: int, size: int, name: str) -> bytes:
    whole = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, _PIECE_BYTES):
        group.receive(whole[start : start + _PIECE_BYTES], rank, f"{name} of rank {rank}")
    return whole.numpy().tobytes()


def _encoded(value: Any) -> bytes:
    tree, tensors = codec.pack(value)
    header = json.dumps(tree).encode()
    # Copies, since what shares memory is refused there; under numbers, since a name may be anything here.
    names = {str(index): each for index, each in enumerate(tensors)}
    body = save({number: tensors[name].detach().cpu().contiguous().clone() for number, name in names.items()})
    known = json.dumps(names).encode()
    return b"".join(
        part for each in (header, known, body) for part in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)
    )


def _decoded(message: bytes) -> Any:
    parts, at = [], 0
    while at < len(message):
        size = int.from_bytes(message[at : at + _LENGTH_BYTES], "little")
        parts.append(message[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    header, known, body = parts
    found = load(body)
    names: Mapping[str, str] = json.loads(known)
    return codec.unpack(json.loads(header), {name: found[number] for number, name in names.items()})
