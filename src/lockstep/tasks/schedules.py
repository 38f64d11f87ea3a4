"""When a learning-rate scheduler is stepped, and how many steps it is made for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.schema import RunConfig, Scheduler
from lockstep.config.values import Interval
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Schedule:
    """A scheduler, when it is stepped, and the metric that it is given: what `Task.scheduler` may return."""

    scheduler: Any
    every: str | Interval = "1 epoch"
    monitor: str | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.scheduler, "step", None)):
            raise ConfigError(
                f"lockstep.Schedule: the scheduler is a {type(self.scheduler).__name__}, which has no step()"
            )
        _ = self.interval

    @property
    def interval(self) -> Interval:
        """`every` as an interval."""
        if isinstance(self.every, Interval):
            return self.every
        text = f"1 {self.every}" if self.every in ("step", "epoch") else self.every
        try:
            return Interval.parse(text)
        except ValueError as error:
            raise ConfigError(f"lockstep.Schedule: every={self.every!r}: {error}") from None


@dataclass
class RunLength:
    """How many steps a run has, where that is known, and what was made to last for so many.

    A scheduler that was told comes back from a checkpoint as it was made: this is saved beside it, so that a run that
    is resumed to be longer does not go on with a schedule that has come to its end.
    """

    steps: int | None
    steps_per_epoch: int | None
    told: dict[str, int] = field(default_factory=dict)

    def of_task(self, task: Any, optimizers: Any) -> Any:
        """What a task's `scheduler` returns, told the number of steps if it has an argument for it."""
        if "total_steps" not in inspect.signature(task.scheduler).parameters:
            return task.scheduler(optimizers)
        if self.steps is None:
            raise ConfigError(f"task: {type(task).__name__}.scheduler takes total_steps, {_UNKNOWN}")
        self.told["steps"] = self.steps
        return task.scheduler(optimizers, total_steps=self.steps)

    def arguments(self, scheduler: Scheduler) -> dict[str, Any]:
        """The arguments of the config's scheduler, with how often it is going to be stepped in place of `auto`."""
        asked = [name for name, value in scheduler.arguments.items() if value == AUTO]
        if not asked:
            return scheduler.arguments
        times = self._times(scheduler.every)
        if times is None:
            raise ConfigError(
                f"scheduler.{asked[0]}: auto, but with scheduler.every: {scheduler.every} nobody knows how often it "
                "will be stepped: count steps or epochs"
                if scheduler.every.unit == "second"
                else f"scheduler.{asked[0]}: auto, {_UNKNOWN}"
            )
        self.told["steps of the scheduler"] = times
        return {**scheduler.arguments, **dict.fromkeys(asked, times)}

    def _times(self, every: Interval) -> int | None:
        if every.unit == "step":
            found = self.steps
        elif every.unit == "epoch" and None not in (self.steps, self.steps_per_epoch):
            found = int(self.steps) // int(self.steps_per_epoch)  # type: ignore[arg-type]
        else:
            found = None
        return None if found is None else max(1, found // int(every.count))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.told)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in self.told.items():
            before = state.get(name, now)
            if now > before:
                raise ConfigError(
                    f"the learning-rate schedule was made for {before} {name}, and this run is to have {now}: it would "
                    "be over before the run is. Set train.epochs or train.steps back, or start a new run from these "
                    "weights"
                )
            if now < before:
                logger.warning(
                    "the learning-rate schedule was made for %d %s, and goes on as if the run still had so many; it "
                    "has %d now", before, name, now,
                )  # fmt: skip


_UNKNOWN = "but how many steps this run has is not known: its data has no length. Set train.steps"


def run_length(config: RunConfig, examples: int | None) -> RunLength:
    """Of a run over so many examples; None: as many as there come."""
    limits = config.train
    if examples is None:
        return RunLength(limits.steps, None)
    whole, rest = divmod(examples, limits.batch_size)
    per_epoch = max(1, whole + (1 if rest and not config.data.drop_last else 0))
    steps = limits.steps if limits.epoch_limit is None else per_epoch * limits.epoch_limit
    return RunLength(steps, per_epoch)


def as_schedule(given: Any) -> Schedule:
    """What `Task.scheduler` returned: a scheduler is stepped every epoch, unless it says otherwise."""
    return given if isinstance(given, Schedule) else Schedule(given)
