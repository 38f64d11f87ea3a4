"""Schedules of the learning rate by name: functions of the step and of how many steps the run has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.config.training import Schedule
from lockstep.errors import ConfigError


def factor(schedule: Schedule, total: int | None) -> Callable[[int], float]:
    """What the rate is multiplied with after so many steps.

    It rises by equal parts, in step n of a warm-up of w to n / w of its height; from there it falls to `final`,
    which it has reached at the end of the run.
    """
    warmup = _warmup_steps(schedule, total)
    falling = (total or 0) - warmup

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.type == "constant":
            return 1.0
        left = 1.0 - min((step - warmup) / falling, 1.0)
        if schedule.type == "cosine":
            left = 0.5 * (1.0 - math.cos(math.pi * left))
        elif schedule.type == "polynomial":
            left = left**schedule.power
        return schedule.final + (1.0 - schedule.final) * left

    return at


class NamedSchedule(LambdaLR):
    """Knows nothing that has to be restored but the step and the rates that it started from.

    A run that is resumed with another number of steps follows, from there on, the schedule of that many.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, total: int | None) -> None:
        super().__init__(optimizer, factor(schedule, total))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        rates = [base * at(self.last_epoch) for base, at in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def _warmup_steps(schedule: Schedule, total: int | None) -> int:
    if total is None and schedule.needs_total():
        what = schedule.type if schedule.type != "constant" else f"warmup: {schedule.warmup}"
        raise ConfigError(
            f"scheduler: {what} has to know how many steps the run has, and data without a length does not tell: set "
            "train.steps"
        )
    if isinstance(schedule.warmup, str):
        assert total is not None
        warmup = round(float(schedule.warmup.rstrip("% ")) / 100 * total)
    else:
        warmup = schedule.warmup
    if total is not None and warmup >= total and schedule.type != "constant":
        raise ConfigError(
            f"scheduler.warmup: {schedule.warmup} is {warmup} steps, but the run has {total}: there is none left "
            f"in which the rate could fall ({schedule.type}). Make it shorter, or train longer"
        )
    return warmup
