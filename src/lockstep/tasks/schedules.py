"""Learning-rate schedules: by name (`type: cosine`) or of torch, when they are stepped, and for how many steps."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lockstep.config.schema import RunConfig, Scheduler
from lockstep.config.training import Schedule as ScheduleSettings
from lockstep.config.values import Interval
from lockstep.data.batches import GlobalBatches, Position, Ramps
from lockstep.data.cursors import Due
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.tasks.callbacks import Callback
from lockstep.tasks.validation import Validation, metric_value

logger = logging.getLogger(__name__)

AUTO = "auto"
_NO_RAMPS = Ramps()


@dataclass(frozen=True)
class Schedule:
    """A scheduler, when it is stepped, and the metric that it is given. `Task.scheduler` may return it."""

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
    """How many steps a run has, if known, and for how many its schedulers were made.

    Saved in checkpoints: a scheduler is restored as it was made, and a longer run must not continue with one that has
    reached its end.
    """

    steps: int | None
    epochs: int | None
    made_for: dict[str, int] = field(default_factory=dict)
    per_epoch: int | None = None

    def of_task(self, task: Any, optimizers: Any) -> Any:
        """Calls a task's `scheduler`, with the number of steps if it has an argument for it."""
        if "total_steps" not in inspect.signature(task.scheduler).parameters:
            return task.scheduler(optimizers)
        if self.steps is None:
            raise ConfigError(f"task: {type(task).__name__}.scheduler takes total_steps, {_UNKNOWN}")
        self.made_for["steps"] = self.steps
        return task.scheduler(optimizers, total_steps=self.steps)

    def arguments(self, scheduler: Scheduler) -> dict[str, Any]:
        """Returns the arguments of the config's scheduler, with the number of its steps in place of `auto`."""
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
        self.made_for["steps of the scheduler"] = times
        return {**scheduler.arguments, **dict.fromkeys(asked, times)}

    def _times(self, every: Interval) -> int | None:
        if every.unit == "step":
            found = self.steps
        elif every.unit == "epoch":
            found = self.epochs
        else:
            found = None
        return None if found is None else max(1, found // int(every.count))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.made_for)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in self.made_for.items():
            before = state.get(name, now)
            if now > before:
                raise ConfigError(
                    f"the learning-rate schedule was made for {before} {name}, and this run is to have {now}: it would "
                    "be over before the run is. Set train.epochs or train.steps back, or start a new run from these "
                    "weights"
                )
            if now < before:
                logger.warning(
                    "the learning-rate schedule was made for %d %s, and continues as if the run still had so many; it "
                    "has %d now", before, name, now,
                )  # fmt: skip


_UNKNOWN = "but how many steps this run has is not known: its data has no length. Set train.steps"


def run_length(config: RunConfig, examples: int | None, ramps: Ramps = _NO_RAMPS) -> RunLength:
    """Returns the length of a run over so many examples; None where the data has no length, or tells it too late."""
    limits = config.train
    counted = limits.tokens is not None or (ramps.batch is not None and ramps.batch.by_tokens)
    if examples is None or (counted and not isinstance(ramps.tokens, int)):
        return RunLength(limits.steps, None)
    plan = GlobalBatches(
        examples, limits.batch_size, shuffle=False, drop_last=config.data.drop_last,
        ramps=replace(ramps, tokens=ramps.tokens if counted else None),
    )  # fmt: skip
    if limits.tokens is None and ramps.batch is None:
        per_epoch = max(1, plan.batches)
        steps = limits.steps if limits.epoch_limit is None else per_epoch * limits.epoch_limit
        return RunLength(steps, None if steps is None else steps // per_epoch, per_epoch=per_epoch)
    at, epochs = Position(), 0
    while plan.batches and epochs != limits.epoch_limit:
        for batch in plan.walk(0, at._replace(batch=0, begin=0)):
            at = batch.after
            if limits.is_done(at.steps, at.tokens):
                return RunLength(at.steps, epochs + batch.is_last)
        epochs += 1
    return RunLength(at.steps, epochs)


def as_schedule(given: Any) -> Schedule:
    return given if isinstance(given, Schedule) else Schedule(given)


def factor(schedule: ScheduleSettings, total: int | None) -> Callable[..., float]:
    """Returns the learning-rate multiplier of a step: linear warm-up, then a fall to `final` at the end of the run.

    It is a function of how many steps are done; or of how many tokens, and how many there will be after the step.
    """
    warmup = _warmup(schedule, total)
    falling = (total or 0) - warmup

    def at(done: int, after: int | None = None) -> float:
        if done < warmup:
            return min((done + 1 if after is None else after) / warmup, 1.0)
        if schedule.type == "constant":
            return 1.0
        left = 1.0 - min((done - warmup) / falling, 1.0)
        if schedule.type == "cosine":
            left = 0.5 * (1.0 - math.cos(math.pi * left))
        elif schedule.type == "polynomial":
            left = left**schedule.power
        return schedule.final + (1.0 - schedule.final) * left

    return at


class NamedSchedule(LambdaLR):
    """A schedule by name. A run that is resumed with another length follows the schedule of that length."""

    def __init__(
        self, optimizer: Optimizer, schedule: ScheduleSettings, total: int | None, tokens: bool = False
    ) -> None:
        """With `tokens`, `total` counts these, and the rate of every step is set before it, by `set_rate`."""
        self.by_tokens = tokens
        super().__init__(optimizer, factor(schedule, total))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        by_tokens = self.by_tokens
        super().load_state_dict(dict(state_dict))
        self.by_tokens = by_tokens
        self.set_rate(self.last_epoch)

    def set_rate(self, *done: int) -> None:
        rates = [base * at(*done) for base, at in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def counts_tokens(schedule: ScheduleSettings, tokens: int | None) -> bool:
    """Returns whether a schedule follows the tokens of a run that trains on so many, or until another limit."""
    if tokens is None and schedule.warms_up_by_tokens and schedule.type != "constant":
        raise ConfigError(
            f"scheduler.warmup: {schedule.warmup}, but the run ends by its steps, which the rate falls by: set "
            "train.tokens, or give the warm-up in steps"
        )
    in_steps = isinstance(schedule.warmup, int) and schedule.warmup > 0
    if tokens is not None and in_steps and schedule.type != "constant":
        raise ConfigError(
            f"scheduler.warmup: {schedule.warmup} steps, but with train.tokens: {tokens} the rate falls by tokens: "
            'write "1e8 tokens", or a fraction such as "5%"'
        )
    return schedule.warms_up_by_tokens or (tokens is not None and not in_steps)


def _warmup(schedule: ScheduleSettings, total: int | None) -> int:
    if total is None and schedule.needs_total():
        what = schedule.type if schedule.type != "constant" else f"warmup: {schedule.warmup}"
        raise ConfigError(
            f"scheduler: {what} has to know how many steps the run has, and data without a length does not tell: set "
            "train.steps"
        )
    if isinstance(schedule.warmup, str) and schedule.warms_up_by_tokens:
        warmup = int(schedule.warmup.split()[0])
    elif isinstance(schedule.warmup, str):
        assert total is not None
        warmup = round(float(schedule.warmup.rstrip("% ")) / 100 * total)
    else:
        warmup = schedule.warmup
    if total is not None and warmup >= total and schedule.type != "constant":
        unit = "tokens" if schedule.warms_up_by_tokens else "steps"
        raise ConfigError(
            f"scheduler.warmup: {schedule.warmup} is {warmup} {unit}, but the run has {total}: there is none left "
            f"in which the rate could fall ({schedule.type}). Make it shorter, or train longer"
        )
    return warmup


class Scheduling(Callback):
    """Steps the learning-rate schedulers; one that watches a metric is given the newest."""

    def __init__(self, schedules: Sequence[Schedule], validation: Validation) -> None:
        self._validation = validation
        self._waits = False  # has said that there is nothing to step by yet
        by_tokens = [each.scheduler for each in schedules if getattr(each.scheduler, "by_tokens", False)]
        self._by_tokens: list[NamedSchedule] = by_tokens
        self._schedules = [(each.scheduler, Due(each.interval), _monitored(each)) for each in schedules
                           if each.scheduler not in by_tokens]  # fmt: skip

    @property
    def monitors(self) -> list[str]:
        """The metrics that are watched."""
        return list(dict.fromkeys(name for _, _, name in self._schedules if name is not None))

    def before_batch(self, run: Run, batch: Any) -> None:
        done, step = run.progress.tokens, run._engine.feed.step
        for schedule in self._by_tokens:
            schedule.set_rate(done, done + (0 if step is None else step.tokens))

    def after_step(self, run: Run) -> str | None:
        for scheduler, due, monitor in self._schedules:
            if not due.now(run.progress, run._engine.seconds_since_start):
                continue
            if monitor is None:
                scheduler.step()
            elif self._validation.history:
                scheduler.step(metric_value(self._validation.latest, monitor, "scheduler.monitor"))
            elif not self._waits:
                self._waits = True
                logger.warning("scheduler: %s comes with the first validation (validation.every); until then the "
                               "scheduler is not stepped", monitor)  # fmt: skip
        return None


def _monitored(schedule: Schedule) -> str | None:
    return schedule.monitor or ("val/loss" if isinstance(schedule.scheduler, ReduceLROnPlateau) else None)
