"""Means over a whole dataset that count every example exactly once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.errors import ConfigError
from lockstep.record.meters import Numbers, Parts, added_up, parts_of


@dataclass(frozen=True)
class Mean:
    """A loss or a metric as a total and a count: of tokens, pixels, pairs, whatever a batch has more or fewer of.

    Gradients and values are then those of the mean over the whole global batch (or dataset): totals are added up over
    micro-batches and ranks, and so are counts, and only then the one is divided by the other.
    """

    total: Tensor
    count: Tensor | float

    def __post_init__(self) -> None:
        for name, value in (("total", self.total), ("count", self.count)):
            if isinstance(value, Tensor) and value.dim() != 0:
                raise ConfigError(
                    f"lockstep.Mean: the {name} must be a single number, got shape {list(value.shape)}: add it up first"
                )
        if not isinstance(self.total, Tensor):
            raise ConfigError(f"lockstep.Mean: the total must be a tensor, got {type(self.total).__name__}")


Measure = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class BatchMean:
    """A value that is known to be the mean over the examples of a batch: the loss of a Task."""

    value: Tensor


def measure_sums(
    measure: Measure,
    micros: Iterable[tuple[MicroBatch, Any]],
    move: Callable[[Any], Any],
    measured: Callable[[], None] = lambda: None,
    together: bool = False,
    collect: Callable[[MicroBatch, Any], None] = lambda micro, batch: None,
) -> tuple[Parts, int]:
    """Returns this rank's sums over its part of the data, in double precision, and how many examples it saw.

    Where the forward pass takes all ranks `together`, one that has no examples of a batch measures it all the same.
    `collect` is given every batch that is measured, and what is known of its examples.
    """

    def measure_and_collect(given: tuple[MicroBatch, Any]) -> Mapping[str, Any]:
        found = measure(given[1])
        collect(*given)
        return found

    batches = ((micro.examples, len(micro.indices), (micro, batch)) for micro, batch in micros)
    return sums_of(measure_and_collect, batches, lambda given: (given[0], move(given[1])), measured, together)


def sums_of(
    measure: Measure,
    batches: Iterable[tuple[int, int, Any]],
    move: Callable[[Any], Any],
    measured: Callable[[], None] = lambda: None,
    together: bool = False,
) -> tuple[Parts, int]:
    """Sums over batches, each with how many examples a mean over it counts for, and its length.

    Values are kept where they were computed, and read once at the end: no batch waits for the one before.
    """
    totals: dict[str, list[tuple[float, Any, Any]]] = {}
    means, counts = set[str](), list[int]()
    with torch.no_grad():
        for examples, length, batch in batches:
            if examples == 0:
                if together:
                    measure(move(batch))
                continue
            for name, value in _by_name(measure(move(batch))).items():
                means |= {name} if isinstance(value, (Mean, BatchMean)) else set()
                # Filler counts for less than it is long, or takes back what other filler added.
                totals.setdefault(name, []).append((examples / length, *_total(name, value, length)))
            counts.append(examples)
            measured()
    for name, each in totals.items():
        if len(each) != len(counts) and name not in means:  # a mean is over the batches that it is there for
            raise ConfigError(f"metric {name!r} is there for {len(each)} of {len(counts)} batches: return it for each")
    return {name: _summed(each) for name, each in totals.items()}, sum(counts)


def combine(parts: list[tuple[Parts, int]], expected: int | None, name: str) -> dict[str, float]:
    """Returns means over all ranks; checks that together they saw every example once, if `expected` is known."""
    seen = sum(count for _, count in parts)
    if expected is not None and seen != expected:
        raise AssertionError(f"{name}: {seen} examples were measured, the dataset has {expected}")
    found = added_up(sums for sums, _ in parts)
    return {metric: total / count if count else math.nan for metric, (total, count) in found.items()}


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Puts models in evaluation mode inside the block, and then every submodule back in its mode."""
    modules = list(models)
    training = [each for model in modules for each in model.modules() if each.training]
    for model in modules:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _by_name(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"measure(batch) returned a {type(found).__name__}: return metrics by name, with one value per example, "
            "such as {'accuracy': right.float()}"
        )
    return found


def _summed(totals: list[tuple[float, Any, Any]]) -> list[list[float]]:
    batches = len(totals)
    found = Numbers([total for _, total, _ in totals] + [count for _, _, count in totals]).read()
    weights = [weight for weight, _, _ in totals]
    return [
        parts_of(weight * total for weight, total in zip(weights, found[:batches], strict=True)),
        parts_of(weight * count for weight, count in zip(weights, found[batches:], strict=True)),
    ]


def _total(name: str, value: Any, length: int) -> tuple[Any, Any]:
    """Returns a value of a batch as a total and a count."""
    if isinstance(value, BatchMean):
        return value.value.detach().double() * length, length
    if isinstance(value, Mean):
        return value.total.detach().double(), value.count
    if not isinstance(value, Tensor):
        raise ConfigError(f"metric {name!r} is a {type(value).__name__}: return a tensor with one value per example")
    if value.dim() == 0:
        raise ConfigError(
            f"metric {name!r} is a single number for a batch of {length} examples: a mean of such numbers depends on "
            "how the data falls into batches and on ranks. Return one value per example, shape [B]; or "
            "lockstep.Mean(total, count) for a mean over something else (tokens, pixels). What is no mean at all (AUC, "
            "F1) is computed from the whole set: by a task's torchmetrics() or epoch_metrics(outputs), see "
            "docs/tasks.md"
        )
    if value.shape != (length,):
        raise ConfigError(
            f"metric {name!r} has shape {list(value.shape)} for a batch of {length} examples: "
            "return one value per example, shape [B]"
        )
    return value.detach().double().sum(), length
