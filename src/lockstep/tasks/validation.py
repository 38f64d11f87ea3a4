"""Validation: measures, stops early, and saves. The names of metrics."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.schema import Checkpoint, Criterion, EarlyStop, Validate
from lockstep.data.cursors import Due
from lockstep.data.loader import Collate
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Measure
from lockstep.tasks.callbacks import Callback


def metric_value(metrics: Mapping[str, float], name: str, path: str) -> float:
    """Returns a metric by name; without validation data, `val/x` means the training metric `train/epoch_x`."""
    found = known_as(name, metrics)
    if found is None:
        raise ConfigError(unknown_metric(path, name, metrics))
    if isinstance(metrics[found], list):
        raise ConfigError(f"{path}: {found!r} is no single number, to be compared with others: name one that is")
    return metrics[found]


def known_as(name: str, metrics: Iterable[str]) -> str | None:
    """Returns the name under which a metric is among others, if it is."""
    there = set(metrics)
    kind, _, rest = name.partition("/")
    if name not in there and any(each.startswith(f"{kind}/") and each.endswith(f"/{rest}") for each in there):
        return None  # of several validation sets each has its own: that of the training is none of them
    trained = epoch_name(f"train/{name.removeprefix('val/')}")
    return next((each for each in (name, trained) if each in there), None)


def epoch_name(name: str) -> str:
    """Returns what a training value is called as its mean since the last validation: `train/epoch_loss`.

    `train/loss` is the mean since the last row (`log.every`): the two must not have one name.
    """
    kind, slash, last = name.rpartition("/")
    return f"{kind}{slash}epoch_{last}"


def unknown_metric(path: str, name: str, metrics: Iterable[str]) -> str:
    there = sorted(metrics)
    near = difflib.get_close_matches(name, there, 1)
    hint = f": did you mean {near[0]}?" if near else "."
    return f"{path}: there is no metric {name!r}{hint} This run has {', '.join(there) or 'none'}"


class EarlyStopping:
    """Counts, for each criterion, the validations since it last improved."""

    def __init__(self, settings: EarlyStop) -> None:
        self._settings = settings
        self._seen = 0
        self._best: list[float | None] = [None] * len(settings.criteria)
        self._stale = [0] * len(settings.criteria)

    def update(self, metrics: Mapping[str, float]) -> str | None:
        """Counts one validation. Returns the reason to stop, if there is one now."""
        self._seen += 1
        for index, criterion in enumerate(self._settings.criteria):
            value = metric_value(metrics, criterion.metric, f"early_stop.criteria[{index}].metric")
            if _improves(value, self._best[index], criterion):
                self._best[index], self._stale[index] = value, 0
            elif self._seen > criterion.grace:
                self._stale[index] += 1
        exhausted = [stale >= self._settings.patience for stale in self._stale]
        stop = any(exhausted) if self._settings.combine == "any" else all(exhausted)
        return self._reason(exhausted) if stop else None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "best": self._best, "stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._best, self._stale = state["seen"], list(state["best"]), list(state["stale"])

    def _reason(self, exhausted: list[bool]) -> str:
        stale = [
            f"{criterion.metric} (best {best:.6g})"
            for criterion, best, done in zip(self._settings.criteria, self._best, exhausted, strict=True)
            if done and best is not None
        ]
        return f"no improvement of {', '.join(stale) or 'any metric'} in {self._settings.patience} validations"


def _improves(value: float, best: float | None, criterion: Criterion) -> bool:
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - criterion.delta if criterion.mode == "min" else value > best + criterion.delta


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
        """Datasets have the prefix of their metrics for a name: `val`, or `val/NAME` for each of several."""
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
        if not self._due.now(run.progress, run._engine.seconds_since_start) and self.unfinished != step:
            return None
        self.unfinished = step
        stop = self.validate(run)
        self.unfinished = None
        return stop

    def validate(self, run: Run) -> str | None:
        """Measures, decides on rank 0 whether to stop, and returns the same answer on every rank."""
        if self._last_step == run.progress.step:
            return None
        run._engine.aggregator.write_due_row(run.progress, run._engine.seconds_since_start)
        run._engine.aggregator.bring_together(run.progress)
        trained = dict(run._engine.aggregator.since_validation.sums)
        metrics: dict[str, Any] = {
            epoch_name(key): each for key, each in run._engine.aggregator.since_validation.take().items()
        }
        if self._datasets:
            found = evaluated(run, self._measure, self._datasets, self._batch_size, self._settings.on, self._collate)
            if found is None:
                run._engine.aggregator.since_validation.sums = trained
                run._engine.leave()
            metrics.update(found)
        self._last_step = run.progress.step
        run.barrier("the end of validation")
        decision = run.agree(lambda: self._decide(run, metrics), "whether to stop early")
        self.load_state_dict(decision["state"])
        run._engine.aggregator.write(run.progress, metrics)
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


class Checkpointing(Callback):
    """Saves the run every so often."""

    def __init__(
        self, settings: Checkpoint, validation: Validation, monitored: Callable[[bool], float | None] | None = None
    ) -> None:
        """`monitored` returns the value that best is judged by, given whether the data was just measured."""
        self._keep, self._due, self._validation = settings.keep, Due(settings.every), validation
        self._monitored = monitored

    def after_step(self, run: Run) -> str | None:
        if self._due.now(run.progress, run._engine.seconds_since_start):
            self.save(run)
        return None

    def save(self, run: Run) -> None:
        latest = self._validation.latest
        measured = bool(latest) and self._validation.history[-1]["step"] == run.progress.step
        name = known_as(self._keep.metric, latest) if measured else None
        value = latest[name] if name is not None else None
        if self._monitored is not None:
            value = self._monitored(measured)
        run.checkpoint(value=value, metrics=latest if measured else {})


def evaluated(
    run: Run,
    measure: Measure,
    datasets: Mapping[str, Dataset[Any]],
    batch_size: int,
    on: str,
    collate: Collate | None,
) -> dict[str, Any] | None:
    """Returns the metrics of datasets by their full names; None where the run is to leave."""
    named = {_waited_for(prefix): each for prefix, each in datasets.items()}
    found = run._engine.evaluate_or_leave(measure, named, batch_size, on, collate)
    if found is None:
        return None
    each_of = zip(datasets, found.values(), strict=True)
    return {f"{prefix}/{name}": value for prefix, values in each_of for name, value in values.items()}


def _waited_for(prefix: str) -> str:
    """Returns what messages call it: `validation`, `validation of NAME`, `test`."""
    kind, _, name = prefix.partition("/")
    kind = "validation" if kind == "val" else kind
    return f"{kind} of {name}" if name else kind
