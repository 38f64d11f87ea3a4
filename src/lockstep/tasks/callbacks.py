"""What happens between steps: the protocol of callbacks, and those of ours, which validate, schedule and save.

The order at a step's end, on every rank: callbacks of one's own (`after_step`), validation, where it is due, and their
`after_validation`, schedulers, their `after_epoch`, where an epoch ended, and last the save, so that it has all that
happened before. What a callback returns is the reason to stop training, if there is one. Reasons are agreed: no rank
stops
on something that another cannot see.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from lockstep.config.objects import construct, import_object
from lockstep.config.schema import Checkpoint, Component, RunConfig, Validate
from lockstep.data.loader import Collate
from lockstep.data.progress import Due
from lockstep.distributed import trouble
from lockstep.engine.run import Run
from lockstep.errors import LOST_PEER, CallbackFailed, ConfigError, LockstepError
from lockstep.evaluation.means import Measure
from lockstep.tasks.early_stop import EarlyStopping, epoch_name, known_as, metric_value
from lockstep.tasks.schedules import Schedule
from lockstep.tasks.task import Task

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


class UserCallbacks:
    """All of them, asked one after the other at every moment that they have a method for."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._named = dict(zip(_names(callbacks), callbacks, strict=True))
        # Where no callback can give a reason, ranks need not tell each other whether one has.
        self._may_stop = {
            moment: any(defines(each, moment) and not returns_nothing(each, moment) for each in callbacks)
            for moment in ("after_step", "after_validation", "after_epoch")
        }
        # Where one says that it may stop a run after a step (`-> str | None`), ranks ask each other after every step.
        # Of any other, they learn at the next control sync.
        self._asks_after_step = any(
            defines(each, "after_step") and may_return_reason(each, "after_step") for each in callbacks
        )
        # The reason to stop that one of them gave: saved, so that a run that is ended before it has stopped still does.
        self.reason: str | None = None

    def register_state(self, run: Run) -> None:
        """Have the states saved with every checkpoint, and restored."""
        for name, callback in self._named.items():
            if defines(callback, STATE[0]):
                run.checkpointer.attached.register(f"callback {name}", _State(name, callback, run), elsewhere="rank 0")
        if self._named:
            run.register_state("callbacks", self)

    def before_training(self, run: Run) -> None:
        self._call("before_training", run)

    def after_step(self, run: Run) -> None:
        if self._asks_after_step or run.world_size == 1:
            self._ask("after_step", run)
        elif reason := self._call("after_step", run):
            run.stop(reason)

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> None:
        self._ask("after_validation", run, metrics)

    def after_epoch(self, run: Run) -> None:
        if run.progress.epoch_ended:
            self._ask("after_epoch", run)

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        self._call("after_training", run, metrics)

    def have_stopped(self, run: Run) -> None:
        """The run is at its end: who resumes it to go on is not stopped by the same reason again."""
        if self.reason is not None:
            self.reason = None
            last = run.checkpointer.last
            run.checkpoint(value=last.value if last else None, metrics=last.metrics if last else None)

    def state_dict(self) -> dict[str, Any]:
        return {"reason": self.reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reason = state["reason"]

    def _ask(self, moment: str, run: Run, *arguments: Any) -> None:
        """Call them, and keep the first reason to stop that one has on any rank: the same on all of them."""
        reason = self._call(moment, run, *arguments)
        if self._may_stop[moment]:
            told = run.gather(
                reason, f"whether a callback stops the run {moment.replace('_', ' ')} {run.progress.step}"
            )
            self.reason = self.reason or next((each for each in told if each), None)

    def _call(self, moment: str, run: Run, *arguments: Any) -> str | None:
        reasons = []
        for name, callback in self._named.items():
            if not defines(callback, moment):
                continue
            returned = _guarded(name, callback, moment, run, *arguments)
            if returned is not None and not (isinstance(returned, str) and self._may_stop.get(moment)):
                allowed = "a reason to stop, as text, or None" if self._may_stop.get(moment) else "nothing"
                raise ConfigError(f"callback {name}.{moment} returned {returned!r}: it may return {allowed}")
            reasons += [f"{returned} (callback {name})"] if returned else []
        return reasons[0] if reasons else None


def own_callbacks(task: Task, config: RunConfig) -> list[Any]:
    """Those of the task, then those of the config, each checked before anything is trained."""
    given = task.callbacks()
    if isinstance(given, (str, dict)) or not hasattr(given, "__iter__"):
        raise ConfigError(f"task: {type(task).__name__}.callbacks() must return a list, got a {type(given).__name__}")
    callbacks = list(given)
    for index, callback in enumerate(callbacks):
        if isinstance(callback, type):
            raise ConfigError(
                f"task: callbacks()[{index}] is the class {callback.__name__}: return {callback.__name__}(...)"
            )
        check_callback(callback, f"task: callbacks()[{index}]")
    for index, component in enumerate(config.callbacks):
        cls = callback_class(component, f"callbacks[{index}]", config.task.type)
        callback = construct(cls, component.arguments, f"callbacks[{index}]")
        check_callback(callback, f"callbacks[{index}]")
        callbacks.append(callback)
    return callbacks


def callback_class(component: Component, path: str, task: str = "") -> Any:
    """What a config names as a callback, with everything that can be known of it without making one.

    A file of callbacks next to the task's travels with it: on another host it is next to the task's there.
    """
    file, _, name = component.type.rpartition(":")
    beside = Path(task.rpartition(":")[0]).parent / Path(file).name
    there = file.endswith(".py") and not Path(file).exists() and beside.exists()
    cls = import_object(f"{beside}:{name}" if there else component.type, path)
    if isinstance(cls, type):
        check_callback(cls, path)
    elif not callable(cls):
        raise ConfigError(
            f"{path}: {component.type} is a {type(cls).__name__}, not a class of callbacks (lockstep.Callback)"
        )
    return cls


class _State:
    """A callback's state, with the callback named where it cannot be had."""

    def __init__(self, name: str, callback: Any, run: Run) -> None:
        self._name, self._callback, self._run = name, callback, run

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _guarded(self._name, self._callback, "state_dict", self._run, without_run=True)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _guarded(self._name, self._callback, "load_state_dict", self._run, state, without_run=True)


def _guarded(name: str, callback: Any, method: str, run: Run, *arguments: Any, without_run: bool = False) -> Any:
    """What a callback's method returns; what it raises is said to be its own."""
    given = arguments if without_run else (run, *arguments)
    activity = run.group.activity
    limit = 0.0 if method == "after_step" else activity.patience  # after an epoch it may well draw samples
    try:
        with activity.within(f"callback {name}.{method}", limit=limit):
            return getattr(callback, method)(*given)
    except Exception as error:
        if isinstance(error, LockstepError) or trouble.of(error) is not None or _lost_peer(error):
            raise  # which says by itself what it is: that another rank is gone, that memory is
        raise CallbackFailed(name, method, run.progress.step, run.rank, error) from error


def _lost_peer(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST_PEER)


def _names(callbacks: Sequence[Any]) -> list[str]:
    """Class names; of several of one class, the second is `Name 2`."""
    found: list[str] = []
    for callback in callbacks:
        kind = type(callback).__name__
        number = 1 + sum(type(each).__name__ == kind for each in callbacks[: len(found)])
        found.append(kind if number == 1 else f"{kind} {number}")
    return found


MOMENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))
STATE = ("state_dict", "load_state_dict")
# What other frameworks call them.
ALIASES = {
    "on_fit_start": "before_training",
    "on_train_start": "before_training",
    "on_train_begin": "before_training",
    "on_train_batch_end": "after_step",
    "on_batch_end": "after_step",
    "on_step_end": "after_step",
    "on_optimizer_step": "after_step",
    "on_validation_end": "after_validation",
    "on_validation_epoch_end": "after_validation",
    "on_evaluate": "after_validation",
    "on_train_epoch_end": "after_epoch",
    "on_epoch_end": "after_epoch",
    "on_fit_end": "after_training",
    "on_train_end": "after_training",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
}
_SIMILAR = 0.75


def check_callback(callback: Any, path: str) -> None:
    """Refuse what is no callback, by the place where it was named; `callback` is an object or its class."""
    cls = callback if inspect.isclass(callback) else type(callback)
    own = _methods(cls)
    if not own & {*MOMENTS, *STATE}:
        has = f"it has {', '.join(sorted(own))}" if own else "it has no method"
        hints = [right for name in sorted(own) if (right := _meant(name, set(MOMENTS)))]
        hint = f", did you mean {hints[0]}?" if hints else ""
        raise ConfigError(
            f"{path}: {cls.__name__} is no callback: {has}, and a callback has one of {', '.join(MOMENTS)}{hint}"
        )
    absent = {*MOMENTS, *STATE} - own
    for name in sorted(own - {*MOMENTS, *STATE}):
        right = _meant(name, absent)
        if right or name.startswith(("before_", "after_")):
            told = f"did you mean {right}?" if right else f"a callback has {', '.join(MOMENTS)}"
            raise ConfigError(f"{path}: {cls.__name__} defines {name}, which Lockstep does not call; {told}")
    missing = [name for name in STATE if name in absent]
    if len(missing) == 1:
        there = next(name for name in STATE if name in own)
        raise ConfigError(f"{path}: {cls.__name__} defines {there}, but not {missing[0]}: a state needs both")
    for name in sorted(own & set(MOMENTS)):
        _check_signature(cls, name, path)


def defines(callback: Any, name: str) -> bool:
    return name in _methods(type(callback))


def returns_nothing(callback: Any, name: str) -> bool:
    """Whether a method says of itself, by `-> None`, that it gives no reason to stop."""
    return getattr(callback, name).__annotations__.get("return", "") in (None, "None")


def may_return_reason(callback: Any, name: str) -> bool:
    """Whether a method says of itself, by `-> str | None`, that it may give one."""
    return "return" in getattr(callback, name).__annotations__ and not returns_nothing(callback, name)


def _methods(cls: type) -> set[str]:
    """The public methods of a class, and of those that it derives from, up to ours."""
    known = [each for each in cls.__mro__ if each not in (Callback, object)]
    return {
        name
        for each in known
        for name, value in vars(each).items()
        if not name.startswith("_") and inspect.isroutine(value)
    }


def _meant(name: str, absent: set[str]) -> str | None:
    alias = ALIASES.get(name)
    if alias is not None:
        return alias if alias in absent else None
    return next(iter(difflib.get_close_matches(name, sorted(absent), n=1, cutoff=_SIMILAR)), None)


def _check_signature(cls: type, name: str, path: str) -> None:
    """A method that cannot take what it is called with would fail hours later."""
    expected = inspect.signature(getattr(Callback, name))
    itself, *given = expected.parameters
    bound = not inspect.isfunction(inspect.getattr_static(cls, name))  # a class method, or a static one
    try:
        inspect.signature(getattr(cls, name)).bind(*given if bound else (itself, *given))
    except TypeError:
        raise ConfigError(
            f"{path}: {cls.__name__}.{name}{inspect.signature(getattr(cls, name))} cannot be called with "
            f"{', '.join(given)}: define {name}{expected}"
        ) from None
    except ValueError:  # no signature to be had
        return
