"""The best value so far of what checkpoints are kept by: for the mark where a new one is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import Keep
from lockstep.record.writers import SPEED


class Best:
    """Of the rows of a run, in their order; of a run that goes on, those before first."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._value: float | None = None

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has a value that is better than all before it."""
        value = row.get(self._keep.metric)
        if SPEED in row or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        better = self._value is None or (value < self._value if self._keep.mode == "min" else value > self._value)
        if better:
            self._value = float(value)
        return better
