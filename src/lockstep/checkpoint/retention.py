"""Which checkpoints to keep: a pure function of what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A checkpoint as far as keeping it is concerned; value is the metric that best is judged by."""

    step: int
    value: float | None = None


def best_first(saved: Sequence[Saved], mode: str) -> list[Saved]:
    """Those with a value, best first; of equals the earlier."""
    sign = 1 if mode == "min" else -1
    judged = [each for each in saved if each.value is not None and each.value == each.value]
    return sorted(judged, key=lambda each: (sign * (each.value or 0.0), each.step))


def to_delete(saved: Sequence[Saved], keep_last: int, keep_best: int, mode: str) -> list[int]:
    """The steps whose checkpoints are neither among the newest nor among the best."""
    newest = sorted(saved, key=lambda each: each.step)[-keep_last:]
    kept = {each.step for each in [*newest, *best_first(saved, mode)[:keep_best]]}
    return sorted(each.step for each in saved if each.step not in kept)
