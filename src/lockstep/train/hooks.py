"""What happens at step and epoch boundaries, in this order: validate and decide, schedule, save.

A hook is called after every step, on every rank, and decides for itself whether it is due. What it returns is the
reason to stop training, if there is one. Reasons are agreed: no rank stops on something that another cannot see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from lockstep.config.schema import Checkpoint, Validate
from lockstep.config.values import Interval
from lockstep.data.loader import Collate
from lockstep.data.progress import Due
from lockstep.train.early_stop import EarlyStopping, known_as, metric_value
from lockstep.train.evaluation import Measure
from lockstep.train.run import Run

logger = logging.getLogger(__name__)


class Hook(Protocol):
    def after_step(self, run: Run) -> str | None: ...


class Validation:
    """Measures the validation data, and decides once, on rank 0, whether to stop early."""

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        measure: Measure,
        batch_size: int,
        settings: Validate,
        early_stopping: EarlyStopping | None,
        collate: Collate | None,
        should_stop: Callable[[dict[str, float]], str | None],
    ) -> None:
        self._should_stop = should_stop
        self._dataset, self._measure, self._batch_size = dataset, measure, batch_size
        self._settings, self._early_stopping, self._collate = settings, early_stopping, collate
        self._due = Due(settings.every)
        self._last_step = -1
        self.unfinished: int | None = None  # the step after which it was due and given up, to be done on resume
        self.history: list[dict[str, float]] = []

    @property
    def latest(self) -> dict[str, float]:
        """The newest metrics: the mean training loss since the validation before, and `val/` ones where there are."""
        return {name: value for name, value in (self.history or [{}])[-1].items() if name not in ("step", "epoch")}

    def after_step(self, run: Run) -> str | None:
        step = run.progress.step
        if not self._due.now(run.progress, run.seconds_since_start) and self.unfinished != step:
            return None
        self.unfinished = step
        stop = self.validate(run)
        self.unfinished = None
        return stop

    def validate(self, run: Run) -> str | None:
        """Train metrics, validation, one decision on rank 0, and the same answer on every rank."""
        if self._last_step == run.progress.step:
            return None
        run.journal.write_due_row(run.progress, run.seconds_since_start)
        run.journal.bring_together(run.progress)
        trained = dict(run.journal.since_validation.sums)
        metrics = run.journal.since_validation.take()
        if self._dataset is not None:
            found = run.evaluate_or_leave(
                self._measure, self._dataset, self._batch_size, self._settings.on, self._collate
            )
            if found is None:
                run.journal.since_validation.sums = trained
                run.leave()
            metrics.update({f"val/{name}": value for name, value in found.items()})
        self._last_step = run.progress.step
        run.barrier("the end of validation")
        decision = run.agree(lambda: self._decide(run, metrics), "whether to stop early")
        self.load_state_dict(decision["state"])
        run.journal.write(run.progress, metrics)
        stop: str | None = decision["stop"]
        return stop

    def _decide(self, run: Run, metrics: Mapping[str, float]) -> dict[str, Any]:
        stop = self._early_stopping.update(metrics) if self._early_stopping is not None else None
        stop = self._should_stop(dict(metrics)) or stop
        self.history.append({"step": run.progress.step, "epoch": run.progress.epochs_done, **metrics})
        return {"stop": stop, "state": self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        early = self._early_stopping.state_dict() if self._early_stopping is not None else None
        return {
            "history": self.history,
            "last_step": self._last_step,
            "early_stopping": early,
            "unfinished": self.unfinished,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history, self._last_step = state["history"], state["last_step"]
        self.unfinished = state.get("unfinished")
        if self._early_stopping is not None and state["early_stopping"] is not None:
            self._early_stopping.load_state_dict(state["early_stopping"])


class Schedule:
    """Steps the learning-rate schedulers; one that watches a metric is given the newest."""

    def __init__(self, schedulers: Sequence[Any], every: Interval, monitor: str | None, validation: Validation) -> None:
        self._schedulers, self._due, self._validation = schedulers, Due(every), validation
        watches = any(isinstance(each, ReduceLROnPlateau) for each in schedulers)
        self.monitor = monitor or ("val/loss" if watches else None)

    def after_step(self, run: Run) -> str | None:
        if self._due.now(run.progress, run.seconds_since_start):
            for scheduler in self._schedulers:
                if self.monitor is None:
                    scheduler.step()
                else:
                    scheduler.step(metric_value(self._validation.latest, self.monitor, "scheduler.monitor"))
        return None


class Checkpointing:
    """Saves the run every so often."""

    def __init__(self, settings: Checkpoint, validation: Validation) -> None:
        self._keep, self._due, self._validation = settings.keep, Due(settings.every), validation

    def after_step(self, run: Run) -> str | None:
        if self._due.now(run.progress, run.seconds_since_start):
            self.save(run)
        return None

    def save(self, run: Run) -> None:
        latest = self._validation.latest
        measured = bool(latest) and self._validation.history[-1]["step"] == run.progress.step
        name = known_as(self._keep.metric, latest) if measured else None
        value = latest[name] if name is not None else None
        last = run.checkpointer.last
        if last is not None and (last.step, last.value) == (run.progress.step, value):
            return  # of this very state, or restored from there
        run.checkpoint(value=value, metrics=latest if measured else {})
