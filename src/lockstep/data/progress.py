"""How far training has come, and when something is due."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.config.values import Interval


@dataclass
class Progress:
    """How far training has come. Equal on all ranks at every step boundary."""

    epoch: int = 0  # whole epochs done
    step: int = 0  # optimizer steps done
    batch: int = 0  # global batches done in the epoch that is under way
    examples: int = 0  # examples trained on, over all ranks
    epoch_ended: bool = False  # whether the last step was the last of its epoch

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Due:
    """Says when an interval has passed. Steps and epochs are counted; seconds are read off a clock that ranks share."""

    def __init__(self, interval: Interval | None) -> None:
        self._interval = interval
        self._last = 0.0

    def now(self, progress: Progress, clock: float) -> bool:
        if self._interval is None:
            return False
        count = self._interval.count
        if self._interval.unit == "step":
            return progress.step % count == 0
        if self._interval.unit == "epoch":
            return progress.epoch_ended and progress.epoch % count == 0
        if clock - self._last < count:
            return False
        self._last = clock
        return True
