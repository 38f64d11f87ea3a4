"""The curves that rows of metrics draw, thinned out without losing what is highest and lowest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from lockstep.runs.records import number

_NO_CURVES = ("step", "epoch")


@dataclass
class Curve:
    """The values of one metric, in the order of their steps."""

    name: str
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    not_finite: list[float] = field(default_factory=list)  # steps at which it was no number


@dataclass(frozen=True)
class Points:
    """A curve to draw. Where several values became one point, it is their mean, between the lowest and the highest."""

    steps: tuple[float, ...]
    means: tuple[float, ...]
    low: tuple[float, ...] = ()  # empty where every value has a point of its own
    high: tuple[float, ...] = ()


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """By the names of metrics."""
    found: dict[str, Curve] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is None:
            continue
        for name, value in row.items():
            if name in _NO_CURVES or (type(value) is not float and isinstance(value, (str, list, dict, bool))):
                continue
            curve = found.get(name)
            if curve is None:
                curve = found[name] = Curve(name)
            if type(value) is float and isfinite(value):
                curve.steps.append(step)
                curve.values.append(value)
            elif (point := number(value)) is not None:
                curve.steps.append(step)
                curve.values.append(point)
            else:
                curve.not_finite.append(step)
    return found


def thinned(curve: Curve, most: int) -> Points:
    """At most so many points, each of the same number of neighbouring values."""
    steps, values = curve.steps, curve.values
    if any(after < before for before, after in itertools.pairwise(steps)):
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps, values = [steps[at] for at in order], [values[at] for at in order]
    count = len(steps)
    if count <= most:
        return Points(tuple(steps), tuple(values))
    bounds = [count * at // most for at in range(most + 1)]
    parts = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    return Points(
        steps=tuple(steps[end - 1] for end in bounds[1:]),
        means=tuple(_mean(part) for part in parts),
        low=tuple(map(min, parts)),
        high=tuple(map(max, parts)),
    )


def _mean(part: Sequence[float]) -> float:
    mean = math.fsum(each / len(part) for each in part)
    return min(max(mean, min(part)), max(part))
