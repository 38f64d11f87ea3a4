"""The loop. It knows no device and no file: those are the run's and the callbacks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.schema import RunConfig
from lockstep.data.loader import Collate
from lockstep.data.orders import Order
from lockstep.engine.run import Run
from lockstep.engine.stepper import needs_closure
from lockstep.errors import ConfigError
from lockstep.tasks.callbacks import Callback, UserCallbacks
from lockstep.tasks.measure import loss_and_values
from lockstep.tasks.task import Task, has_training_step


def train(
    run: Run,
    task: Task,
    data: Dataset[Any],
    collate: Collate | None,
    config: RunConfig,
    callbacks: Sequence[Callback],
    own: UserCallbacks,
    unfinished: bool = False,
    order: Order | None = None,
) -> str | None:
    """Train until a limit is reached; returns why it stopped before that, if it did.

    `callbacks` validate, schedule and, last, save. `unfinished` is a run that was left before they were done with the
    last
    step, in the midst of its validation: they begin with that.
    """
    limits = config.train
    if unfinished and (stop := _after_user_callbacks(run, callbacks, own)):
        return stop
    if own.reason is not None:  # which the run was ended over before it could stop by itself
        return own.reason
    training_step = step_of(task)
    for _ in run.epochs(limits.epoch_limit):
        batches = run.batches(
            data,
            limits.batch_size,
            order=order,
            shuffle=config.data.shuffle,  # of a stream's shards; other data has an order
            drop_last=config.data.drop_last,
            accumulate=limits.accumulate,
            collate=collate,
        )
        for batch in batches:
            if limits.steps is not None and run.progress.step >= limits.steps:
                return None
            if not training_step(run, task, batch):
                continue
            stop = _after_step(run, callbacks, own)
            if stop or run.progress.step == limits.steps:
                return stop
    return run.stopped


def step_of(task: Task) -> Callable[[Run, Task, Any], bool]:
    """What is done with a batch; it says whether the batch was complete."""
    return _own_step if has_training_step(task) else _usual_step


def _after_step(run: Run, callbacks: Sequence[Callback], own: UserCallbacks) -> str | None:
    own.after_step(run)
    return _after_user_callbacks(run, callbacks, own)


def _after_user_callbacks(run: Run, callbacks: Sequence[Callback], own: UserCallbacks) -> str | None:
    """What follows, so that a save at the end has everything that was done for the step."""
    *before, saving = callbacks
    reasons = [callback.after_step(run) for callback in before]
    own.after_epoch(run)
    saving.after_step(run)
    return own.reason or next((reason for reason in reasons if reason), None)


def _usual_step(run: Run, task: Task, batch: Any) -> bool:
    """Forward, backward, step; whether the batch is complete."""
    if run.optimizer is not None and needs_closure(run.optimizer):
        return _step_with_closure(run, task, batch)
    _log_loss(run, *_computed(run, task, batch))
    return run.step()


def _step_with_closure(run: Run, task: Task, batch: Any) -> bool:
    """For an optimizer that computes the loss itself, several times; the first is logged."""
    computed: list[tuple[Any, dict[str, Any]]] = []
    stepped = run.step(closure=lambda: computed.append(_computed(run, task, batch)))
    _log_loss(run, *computed[0])
    return stepped


def _computed(run: Run, task: Task, batch: Any) -> tuple[Any, dict[str, Any]]:
    with run.autocast():
        loss, values = loss_and_values(task.loss(run.model, batch), task)
    run.backward(loss)
    return loss, values


def _log_loss(run: Run, loss: Any, values: dict[str, Any]) -> None:
    run.log(**{"train/loss": loss}, **{f"train/{name}": value for name, value in values.items()})


def _own_step(run: Run, task: Task, batch: Any) -> bool:
    """The task's own training step, with what it returns logged; whether the batch is complete."""
    before, complete = run.progress.step, run.completes_batch
    values = task.training_step(run, batch) or {}
    if complete and run.progress.step == before:
        raise ConfigError(
            f"task: {type(task).__name__}.training_step did not step any optimizer: call run.backward(loss) and "
            "run.step(optimizer) in it"
        )
    run.log(**{name if "/" in name else f"train/{name}": value for name, value in values.items()})
    return complete
