"""What losses that should be equal come to: how far apart they are, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Losses = Mapping[int, float]
Verdict = Literal["reference", "agrees", "differs", "failed", "random", "not here"]

# Per step, relative; docs/verify.md says where it comes from. That of fp8 is a guess: ten times that of bf16.
TOLERANCE_PER_STEP = {"float32": 2e-6, "tf32": 1e-3, "bf16": 2e-3, "fp16": 2e-3, "fp8": 2e-2}

# Of a metric at the end, relative: of a hundred examples, one.
METRIC_TOLERANCE = 0.01


def tolerance(precision: str, steps: int) -> float:
    """What two orders of summation may differ by after so many steps, with room to spare."""
    return TOLERANCE_PER_STEP[precision] * steps


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference, the first step at which it is more than allowed, and the difference there."""

    largest: float
    first_step: int | None = None
    at_first: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.first_step is None


def compare(reference: Losses, losses: Losses, allowed: float) -> Comparison:
    """Step by step. A step that only one of them has is as different as can be."""
    apart = {step: _difference(reference.get(step), losses.get(step)) for step in sorted({*reference, *losses})}
    first = next((step for step, difference in apart.items() if not difference <= allowed), None)
    return Comparison(max(apart.values(), default=math.inf), first if apart else 0, apart.get(first or 0, 0.0))


def metrics_apart(reference: Mapping[str, float], metrics: Mapping[str, float], allowed: float) -> dict[str, float]:
    """The metrics at the end that differ by more than is allowed, and by how much.

    A loss moves with the weights. Other metrics may jump: one example on the other side of a threshold is no fault.
    """
    apart = {name: _difference(reference.get(name), metrics.get(name)) for name in sorted({*reference, *metrics})}
    return {
        name: difference
        for name, difference in apart.items()
        if not difference <= (allowed * 10 if "loss" in name else max(allowed, METRIC_TOLERANCE))
    }


def _difference(reference: float | None, other: float | None) -> float:
    if reference is None or other is None or not (math.isfinite(reference) and math.isfinite(other)):
        return math.inf
    if reference == other:
        return 0.0
    return abs(other - reference) / abs(reference) if reference else math.inf
