"""Means over a whole dataset that count every example exactly once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Loader
from lockstep.errors import ConfigError
from lockstep.metrics import Sums

Measure = Callable[[Any], Mapping[str, Tensor]]


def measure_sums(measure: Measure, loader: Loader, move: Callable[[Any], Any]) -> tuple[Sums, int]:
    """This rank's sums over its part of the data, in double precision, and how many examples it saw."""
    return sums_of(measure, ((part.examples, batch) for part, batch in loader.epoch(0)), move)


def sums_of(measure: Measure, counted: Iterable[tuple[int, Any]], move: Callable[[Any], Any]) -> tuple[Sums, int]:
    """The same over batches of any source, each with how many examples of it count."""
    totals: dict[str, Tensor] = {}
    seen = 0
    with torch.no_grad():
        for examples, batch in counted:
            if examples == 0:
                continue
            for name, value in measure(move(batch)).items():
                amount = _sum(name, value, examples)
                totals[name] = totals[name] + amount if name in totals else amount
            seen += examples
    return {name: [float(total), float(seen)] for name, total in totals.items()}, seen


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


def _sum(name: str, value: Tensor, examples: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigError(f"metric {name!r} is a {type(value).__name__}: return a tensor with one value per example")
    if value.dim() == 0:
        return value.detach().double() * examples  # a mean over the batch
    if value.shape != (examples,):
        raise ConfigError(
            f"metric {name!r} has shape {list(value.shape)} for a batch of {examples} examples: "
            "return one value per example, shape [B]"
        )
    return value.detach().double().sum()
