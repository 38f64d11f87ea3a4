"""Compares losses and metrics; the records of what was asked of a comparison, and of what it found."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.verify.combinations import Combination
from lockstep.verify.trial import Trial

Losses = Mapping[int, float]
Verdict = Literal["reference", "agrees", "differs", "failed", "random"]

# Per step, relative; docs/verify.md says where it comes from. That of fp8 is a guess: ten times that of bf16.
TOLERANCE_PER_STEP = {"float32": 2e-6, "tf32": 1e-3, "bf16": 2e-3, "fp16": 2e-3, "fp8": 2e-2}

# Of a metric at the end, relative: of a hundred examples, one.
METRIC_TOLERANCE = 0.01


def tolerance(precision: str, steps: int) -> float:
    """Returns the difference that another order of summation may make after so many steps, with room to spare."""
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
    """Compares step by step. A step that only one of them has is infinitely different."""
    apart = {step: _difference(reference.get(step), losses.get(step)) for step in sorted({*reference, *losses})}
    first = next((step for step, difference in apart.items() if not difference <= allowed), None)
    return Comparison(max(apart.values(), default=math.inf), first if apart else 0, apart.get(first or 0, 0.0))


def metrics_apart(reference: Mapping[str, float], metrics: Mapping[str, float], allowed: float) -> dict[str, float]:
    """Returns the final metrics that differ by more than is allowed, and by how much.

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


@dataclass(frozen=True)
class Asked:
    config: Path
    steps: int
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    tolerance: float | None = None
    limit: float = 300.0
    resume: bool = True


@dataclass(frozen=True)
class Judged:
    """A run and its verdict."""

    verdict: Verdict
    trial: Trial
    comparison: Comparison | None = None
    metrics_apart: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)  # here, reference
    resumed_from: str = ""


@dataclass(frozen=True)
class Row:
    """A combination: from the start, and from another's checkpoint (None where that was not tried)."""

    combination: Combination
    fresh: Judged
    resumed: Judged | None = None

    @property
    def good(self) -> bool:
        runs = [self.fresh] if self.resumed is None else [self.fresh, self.resumed]
        return all(each.verdict in ("reference", "agrees") for each in runs)


@dataclass(frozen=True)
class Report:
    """The first row is the reference."""

    asked: Asked
    precision: str
    tolerance: float
    rows: Sequence[Row]
    not_here: Mapping[str, str] = field(default_factory=dict)  # combinations that cannot run -> why
    required: Collection[str] = ()
    random: bool = False  # the task draws random numbers while it trains
    random_arguments: Sequence[str] = ()  # of the task, that are probably the reason
    batch_norm: Sequence[str] = ()  # layers that normalise by a rank's part of the batch
    # The reference with its batches taken in halves: another order of summation, and nothing else.
    control: Comparison | None = None

    @property
    def agrees(self) -> bool:
        """At least one was compared, all that were agree, and none that is required is missing."""
        return len(self.rows) > 1 and all(row.good for row in self.rows) and not self.required_missing

    @property
    def required_missing(self) -> dict[str, str]:
        return {name: reason for name, reason in self.not_here.items() if name in self.required}
