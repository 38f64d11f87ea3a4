"""How far training has come, and when something is due."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.config.values import Interval


@dataclass
class Progress:
    """How far training has come. Equal on all ranks at every step boundary."""

    epoch: int = 0  # whole epochs done and left behind, what follows their last step included
    step: int = 0  # global batches trained on, however many optimizers stepped for each
    batch: int = 0  # global batches done in the pass over the data that is under way
    examples: int = 0  # examples trained on, over all ranks
    epoch_ended: bool = False  # whether the last step was the last of its pass over the data

    @property
    def epochs_done(self) -> int:
        """Whole epochs, counting one whose last step was the last one made."""
        return self.epoch + self.epoch_ended

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.epoch_ended = self.epoch + 1, 0, False

    def state_dict(self, epoch_is_done: bool = False) -> dict[str, Any]:
        """With `epoch_is_done`, as it will be once the loop has come back for the next epoch."""
        state = asdict(self)
        return {**state, "epoch": self.epoch + 1, "batch": 0, "epoch_ended": False} if epoch_is_done else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in (each.name for each in fields(self)):
            setattr(self, name, state[name])


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
            return progress.epoch_ended and progress.epochs_done % count == 0
        if clock - self._last < count:
            return False
        self._last = clock
        return True
