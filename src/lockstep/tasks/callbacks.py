"""Callbacks: the protocol, and the calls of those that the task and the config name.

The order at the end of a step, on every rank: user callbacks (`after_step`); validation, where it is due, and
`after_validation`; schedulers; `after_epoch`, where an epoch has ended; and last the save, so that it has everything
before it. A callback may return a reason to stop training. Reasons are agreed: no rank stops on something that another
cannot see.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lockstep.config.objects import construct, import_object
from lockstep.config.schema import Component, RunConfig
from lockstep.distributed import failure
from lockstep.engine.run import Run
from lockstep.errors import LOST_PEER, CallbackFailed, ConfigError, LockstepError
from lockstep.runtime.base import generator_states, seed_generators, set_generator_states
from lockstep.tasks.task import Task

logger = logging.getLogger(__name__)


_BEFORE_STEP = (1, 1)  # sets these random numbers apart from those of training


class Callback:
    """Something that happens between steps, on every rank. Derive from it, or define some of its methods.

    With `state_dict` and `load_state_dict`, a callback is saved in every checkpoint and restored from it: what rank 0
    has is what all ranks get back. A method must do the same on all ranks, as far as it talks to others (run.agree).
    """

    def before_training(self, run: Run) -> None:
        """Models are set up, a resumed run is restored; called once by every start of a run."""

    def before_batch(self, run: Run, batch: Any) -> None:
        """A batch is about to be trained on: this rank's part, or a micro-batch of it."""

    def after_batch(self, run: Run, batch: Any) -> None:
        """A batch was trained on, or a micro-batch."""

    def before_optimizer_step(self, run: Run, optimizer: Optimizer) -> None:
        """An optimizer is about to step. `run.gradients(optimizer)` has its gradients, reduced and unscaled, before
        `train.clip_norm`; what is changed in place is stepped with. Random numbers are the same on all ranks here."""

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
        """Training has ended, was measured and saved; not called where a run failed or was asked to leave."""

    def after_exception(self, run: Run, error: Exception) -> None:
        """Training has failed on this rank; other ranks may be gone already, so do not talk to them."""


class FirstStep(Callback):
    """Ends training after one step of this start: `lockstep train --fast`."""

    def __init__(self, begins_at: int) -> None:
        self._begins_at = begins_at

    def before_training(self, run: Run) -> None:
        if run.progress.step != self._begins_at:
            raise ConfigError(f"--fast: this start began at step {run.progress.step}, not at {self._begins_at}")

    def after_step(self, run: Run) -> str | None:
        return "--fast: one step is enough"


class UserCallbacks:
    """Calls the callbacks of the task and of the config, in that order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._named = dict(zip(_names(callbacks), callbacks, strict=True))
        # Where no callback can give a reason, ranks need not exchange whether one has.
        self._may_stop = {
            moment: any(defines(each, moment) and not returns_nothing(each, moment) for each in callbacks)
            for moment in ("after_step", "after_validation", "after_epoch")
        }
        # Where one may stop a run after a step (`-> str | None`), ranks exchange that after every step; else they learn
        # of it at the next control sync.
        self._asks_after_step = any(
            defines(each, "after_step") and may_return_reason(each, "after_step") for each in callbacks
        )
        # To stop, also one that is none of theirs; saved, so that a run that is ended before it has stopped still does.
        self.reason: str | None = None

    def register_state(self, run: Run) -> None:
        for name, callback in self._named.items():
            if defines(callback, STATE[0]):
                run._engine.checkpointer.registered.register(
                    f"callback {name}", _State(name, callback, run), elsewhere="rank 0"
                )
        run.register_state("callbacks", self)

    def before_training(self, run: Run) -> None:
        self._call("before_training", run)

    def before_batch(self, run: Run, batch: Any) -> None:
        self._call("before_batch", run, batch)

    def after_batch(self, run: Run, batch: Any) -> None:
        self._call("after_batch", run, batch)

    def watch_optimizers(self, run: Run) -> None:
        """Calls before_optimizer_step, where a callback defines it."""
        runtime, seed = run._engine.runtime, run._engine.settings.seed

        def before_step(optimizer: Optimizer) -> None:
            states = generator_states(runtime)
            index = next(number for number, each in enumerate(run.optimizers.values()) if each is optimizer)
            seed_generators(runtime, seed, run._engine.feed.step_number, index, *_BEFORE_STEP)
            self._call("before_optimizer_step", run, optimizer)
            set_generator_states(runtime, states)

        if any(defines(each, "before_optimizer_step") for each in self._named.values()):
            run._engine.stepper.before_step = before_step

    def after_exception(self, run: Run, error: Exception) -> None:
        try:
            self._call("after_exception", run, error)
        except Exception:  # what has failed before is what the run ends with
            logger.exception("a callback failed in after_exception")

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
        """Forgets the reason to stop: a run that is resumed to train longer does not stop again."""
        if self.reason is not None:
            self.reason = None
            last = run._engine.checkpointer.last
            run.checkpoint(value=last.value if last else None, metrics=last.metrics if last else None)

    def state_dict(self) -> dict[str, Any]:
        return {"reason": self.reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reason = state["reason"]

    def _ask(self, moment: str, run: Run, *arguments: Any) -> None:
        """Calls them, and keeps the first reason to stop of any rank, on all of them."""
        reason = self._call(moment, run, *arguments)
        if self._may_stop[moment]:
            name = f"whether a callback stops the run {moment.replace('_', ' ')} {run.progress.step}"
            self.reason = self.reason or next((each for each in run.gather(reason, name) if each), None)

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
    """Returns the callbacks of the task, then those of the config, checked."""
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
    """Returns what a config names as a callback, checked as far as possible without making one.

    A file of callbacks next to the task's travels with it: on another host it is looked for next to the task there.
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
    """The state of a callback; an error names the callback."""

    def __init__(self, name: str, callback: Any, run: Run) -> None:
        self._name, self._callback, self._run = name, callback, run

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _guarded(self._name, self._callback, "state_dict", self._run, without_run=True)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _guarded(self._name, self._callback, "load_state_dict", self._run, state, without_run=True)


def _guarded(name: str, callback: Any, method: str, run: Run, *arguments: Any, without_run: bool = False) -> Any:
    """Calls a method of a callback; what it raises becomes a CallbackFailed that names it."""
    given = arguments if without_run else (run, *arguments)
    activity = run._engine.group.activity
    often = "step" in method or "batch" in method
    limit = 0.0 if often else activity.patience  # after an epoch it may well draw samples
    try:
        with activity.within(f"callback {name}.{method}", limit=limit):
            return getattr(callback, method)(*given)
    except Exception as error:
        if isinstance(error, LockstepError) or failure.local_error(error) is not None or _lost_peer(error):
            raise  # which says what it is: another rank is gone, or memory is
        raise CallbackFailed(name, method, run.progress.step, run.rank, error) from error


def _lost_peer(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST_PEER)


def _names(callbacks: Sequence[Any]) -> list[str]:
    found: list[str] = []
    for callback in callbacks:
        kind = type(callback).__name__
        number = 1 + sum(type(each).__name__ == kind for each in callbacks[: len(found)])
        found.append(kind if number == 1 else f"{kind} {number}")
    return found


MOMENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))


STATE = ("state_dict", "load_state_dict")


def check_callback(callback: Any, path: str) -> None:
    """Refuses an object or class that is no callback, or has methods that Lockstep does not call."""
    cls = callback if inspect.isclass(callback) else type(callback)
    own = _methods(cls)
    known = f"a callback has {', '.join(MOMENTS)}"
    if not own & {*MOMENTS, *STATE}:
        raise ConfigError(f"{path}: {cls.__name__} is no callback: {known}")
    for name in sorted(own - set(MOMENTS)):
        if name.startswith(("before_", "after_", "on_")):
            raise ConfigError(f"{path}: {cls.__name__} defines {name}, which Lockstep does not call; {known}")
    if len(own & set(STATE)) == 1:
        raise ConfigError(f"{path}: {cls.__name__} defines one of {' and '.join(STATE)}: a state needs both")


def defines(callback: Any, name: str) -> bool:
    return name in _methods(type(callback))


def returns_nothing(callback: Any, name: str) -> bool:
    """Returns whether a method is annotated with `-> None`: it gives no reason to stop."""
    return getattr(callback, name).__annotations__.get("return", "") in (None, "None")


def may_return_reason(callback: Any, name: str) -> bool:
    """Returns whether a method is annotated with `-> str | None`."""
    return "return" in getattr(callback, name).__annotations__ and not returns_nothing(callback, name)


def _methods(cls: type) -> set[str]:
    methods = [item for each in cls.__mro__ if each not in (Callback, object) for item in vars(each).items()]
    return {name for name, value in methods if not name.startswith("_") and inspect.isroutine(value)}
