"""What happens between steps: the protocol of callbacks, and those of ours, which validate, schedule and save.

The order at a step's end, on every rank: callbacks of one's own (`after_step`), validation, where it is due, and their
`after_validation`, schedulers, their `after_epoch`, where an epoch ended, and last the save, so that it has all that
happened before. What a callback returns is the reason to stop training, if there is one. Reasons are agreed: no rank
stops
on something that another cannot see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from lockstep.config.schema import Checkpoint, Validate
from lockstep.data.cursors import Due
from lockstep.data.loader import Collate
from lockstep.engine.run import Run
from lockstep.evaluation.means import Measure
from lockstep.tasks.early_stop import EarlyStopping, epoch_name, known_as, metric_value
from lockstep.tasks.schedules import Schedule

logger = logging.getLogger(__name__)


class Callback:
    """Something that happens between steps, on every rank. Derive from it, or define some of its methods.

    With `state_dict` and `load_state_dict`, a callback is saved in every checkpoint and restored from it: what rank 0
    has
    is what all ranks get back. A method must do the same on all ranks, as far as it talks to others (run.agree).
    """

    def before_training(self, run: Run) -> None:
        """Models are set up, a resumed run is restored; called once by every start of a run."""

    def after_step(self, run: Run) -> str | None:
        """A step is done: run.progress.step has its number. May return a reason to stop, of any rank.

        Annotated with `-> str | None`, it stops all ranks after that very step, for which they ask each other after
        every step. Without an annotation, ranks learn of the reason at the next control sync, half a second later.
        """
        return None

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> str | None:
        """The validation data was measured; metrics by their names in metrics.jsonl. May return a reason to stop."""
        return None

    def after_epoch(self, run: Run) -> str | None:
        """The step was the last of a pass over the training data. May return a reason to stop."""
        return None

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        """Training came to its end, was measured and saved; not where a run failed or was asked to leave."""


class Validation(Callback):
    """Measures the validation data, and decides once, on rank 0, whether to stop early."""

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        measure: Measure,
        batch_size: int,
        settings: Validate,
        early_stopping: EarlyStopping | None,
        collate: Collate | None,
        should_stop: Callable[[dict[str, float]], str | None],
        after_validation: Callable[[Run, dict[str, Any]], None] = lambda run, metrics: None,
    ) -> None:
        """Datasets by the beginning of their metrics' names: `val`, or `val/NAME` for each of several."""
        self._should_stop, self._after_validation = should_stop, after_validation
        self._datasets, self._measure, self._batch_size = datasets, measure, batch_size
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
        run.aggregator.write_due_row(run.progress, run.seconds_since_start)
        run.aggregator.bring_together(run.progress)
        trained = dict(run.aggregator.since_validation.sums)
        metrics: dict[str, Any] = {
            epoch_name(key): each for key, each in run.aggregator.since_validation.take().items()
        }
        if self._datasets:
            found = evaluated(run, self._measure, self._datasets, self._batch_size, self._settings.on, self._collate)
            if found is None:
                run.aggregator.since_validation.sums = trained
                run.leave()
            metrics.update(found)
        self._last_step = run.progress.step
        run.barrier("the end of validation")
        decision = run.agree(lambda: self._decide(run, metrics), "whether to stop early")
        self.load_state_dict(decision["state"])
        run.aggregator.write(run.progress, metrics)
        stop: str | None = decision["stop"]
        self._after_validation(run, dict(metrics))
        return stop

    def _decide(self, run: Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
        stop = self._early_stopping.update(metrics) if self._early_stopping is not None else None
        stop = self._should_stop(dict(metrics)) or stop
        # Matrices and curves are in metrics.jsonl: what is kept here is in every checkpoint.
        single = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        self.history.append({"step": run.progress.step, "epoch": run.progress.epochs_done, **single})
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


class Scheduling(Callback):
    """Steps the learning-rate schedulers; one that watches a metric is given the newest."""

    def __init__(self, schedules: Sequence[Schedule], validation: Validation) -> None:
        self._validation = validation
        self._schedules = [(each.scheduler, Due(each.interval), _monitored(each)) for each in schedules]

    @property
    def monitors(self) -> list[str]:
        """The metrics that are watched."""
        return list(dict.fromkeys(name for _, _, name in self._schedules if name is not None))

    def after_step(self, run: Run) -> str | None:
        for scheduler, due, monitor in self._schedules:
            if not due.now(run.progress, run.seconds_since_start):
                continue
            if monitor is None:
                scheduler.step()
            else:
                scheduler.step(metric_value(self._validation.latest, monitor, "scheduler.monitor"))
        return None


def _monitored(schedule: Schedule) -> str | None:
    return schedule.monitor or ("val/loss" if isinstance(schedule.scheduler, ReduceLROnPlateau) else None)


class Checkpointing(Callback):
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


def evaluated(
    run: Run,
    measure: Measure,
    datasets: Mapping[str, Dataset[Any]],
    batch_size: int,
    on: str,
    collate: Collate | None,
) -> dict[str, Any] | None:
    """The metrics of some datasets by their whole names; None where the run is to leave."""
    named = {_waited_for(prefix): each for prefix, each in datasets.items()}
    found = run.evaluate_or_leave(measure, named, batch_size, on, collate)
    if found is None:
        return None
    each_of = zip(datasets, found.values(), strict=True)
    return {f"{prefix}/{name}": value for prefix, values in each_of for name, value in values.items()}


def _waited_for(prefix: str) -> str:
    """What ranks are said to be at: `validation`, `validation of NAME`, `test`."""
    kind, _, name = prefix.partition("/")
    kind = "validation" if kind == "val" else kind
    return f"{kind} of {name}" if name else kind
