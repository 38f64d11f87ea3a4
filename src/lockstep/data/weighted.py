"""Examples drawn by weight, as torch's WeightedRandomSampler draws them: a pure function of the seed and the epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.orders import WEIGHTED_STREAM, Made, digest
from lockstep.data.permutation import Indices, uniform
from lockstep.errors import ConfigError

Numbers = npt.NDArray[np.float64]


class Weighted(Made):
    """With replacement, every draw is by the weights, whatever was drawn before. Without, what was drawn is out."""

    name = "weighted"

    def __init__(self, count: int, seed: int, weights: Any, replacement: bool = True, draws: int | None = None) -> None:
        super().__init__(count)
        self._seed, self._weights, self._replacement = seed, checked_weights(weights, count), replacement
        self._length = count if draws is None else draws
        # Added up one after the other, which gives the same sums on every machine.
        self._sums = np.cumsum(self._weights)
        there = int(np.count_nonzero(self._weights))
        if not replacement and self._length > there:
            raise ConfigError(
                f"data.order: {self._length} examples cannot be drawn without replacement: {there} of {count} have a "
                "weight above 0. Lower count, or draw with replacement: true"
            )

    @property
    def length(self) -> int:
        return self._length

    def facts(self, epoch: int) -> dict[str, Any]:
        drawn = {"replacement": self._replacement, "length": self._length, "weights": digest(self._weights)}
        return {**super().facts(epoch), **drawn}

    def at(self, epoch: int, places: Indices) -> Indices:
        if not self._replacement:
            return super().at(epoch, places)
        # Above 0 and up to the whole sum: an example of weight 0 has no room between two sums, and is never met.
        wanted = uniform(places, WEIGHTED_STREAM, self._seed, epoch) * self._sums[-1]
        found: Indices = np.searchsorted(self._sums, wanted, side="left").astype(np.int64, copy=False)
        return found

    def make(self, epoch: int) -> Indices:
        """Without replacement: each example waits for an exponential time at the rate of its weight; the first come."""
        there = np.flatnonzero(self._weights)
        times = -np.log(uniform(there, WEIGHTED_STREAM, self._seed, epoch)) / self._weights[there]
        return there[np.argsort(times, kind="stable")[: self._length]].astype(np.int64, copy=False)


def checked_weights(given: Any, count: int) -> Numbers:
    weights = numbers(given, count, "weights")
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        raise ConfigError(
            f"data.order: the weight of example {wrong[0]} is {weights[wrong[0]]:g} ({len(wrong)} such of {count}): "
            "weights are 0 or more, and finite"
        )
    if not weights.any():
        raise ConfigError(f"data.order: all {count} weights are 0, so that there is nothing to draw")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not np.isfinite(total):
        raise ConfigError(f"data.order: the {count} weights add up to more than a number can hold: scale them down")
    return weights


def numbers(given: Any, count: int, name: str) -> Numbers:
    """One number per example, from whatever holds them."""
    detached = given.detach().cpu() if hasattr(given, "detach") else given
    try:
        found = np.asarray(detached, dtype=np.float64)
    except (TypeError, ValueError) as error:
        kind = type(given).__name__
        raise ConfigError(f"data.order: {name} must be one number per example, got a {kind}: {error}") from None
    if found.shape != (count,):
        raise ConfigError(
            f"data.order: there are {count} examples, but {name} of shape {list(found.shape)}: give one number for each"
        )
    return found
