"""Means over a whole dataset that count every example exactly once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.record.meters import Sums, numbers

Measure = Callable[[Any], Mapping[str, Tensor]]


def measure_sums(
    measure: Measure, loader: Loader, move: Callable[[Any], Any], measured: Callable[[], None] = lambda: None
) -> tuple[Sums, int]:
    """This rank's sums over its part of the data, in double precision, and how many examples it saw."""
    batches = ((part.examples, len(part.indices), batch) for part, batch in loader.epoch(0))
    return sums_of(measure, batches, move, measured)


def sums_of(
    measure: Measure,
    batches: Iterable[tuple[int, int, Any]],
    move: Callable[[Any], Any],
    measured: Callable[[], None] = lambda: None,
) -> tuple[Sums, int]:
    """The same over batches of any source, each with how many examples a mean over it counts for, and its length.

    Means are kept where they were computed, and read once at the end: no batch waits for the one before.
    """
    means: dict[str, list[Tensor]] = {}
    counts: list[int] = []
    with torch.no_grad():
        for examples, length, batch in batches:
            if examples == 0:
                continue
            for name, value in measure(move(batch)).items():
                means.setdefault(name, []).append(_mean(name, value, length))
            counts.append(examples)
            measured()
    seen = sum(counts)
    return {name: [_total(name, each, counts), float(seen)] for name, each in means.items()}, seen


def combine(parts: list[tuple[Sums, int]], expected: int, name: str) -> dict[str, float]:
    """Means over all ranks, after checking that together they saw every example once."""
    seen = sum(count for _, count in parts)
    if seen != expected:
        raise AssertionError(f"{name}: {seen} examples were measured, the dataset has {expected}")
    totals: dict[str, float] = {}
    for sums, _ in parts:
        for metric, (total, _) in sums.items():
            totals[metric] = totals.get(metric, 0.0) + total
    return {metric: total / expected for metric, total in totals.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every submodule back in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _total(name: str, means: list[Tensor], counts: list[int]) -> float:
    if len(means) != len(counts):
        raise ConfigError(f"metric {name!r} is there for {len(means)} of {len(counts)} batches: return it for each")
    return math.fsum(mean * count for mean, count in zip(numbers(means), counts, strict=True))


def _mean(name: str, value: Tensor, length: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigError(f"metric {name!r} is a {type(value).__name__}: return a tensor with one value per example")
    if value.dim() == 0:
        return value.detach().double()  # a mean over the batch
    if value.shape != (length,):
        raise ConfigError(
            f"metric {name!r} has shape {list(value.shape)} for a batch of {length} examples: "
            "return one value per example, shape [B]"
        )
    return value.detach().double().mean()
