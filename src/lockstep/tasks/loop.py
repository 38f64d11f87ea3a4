"""The training loop. It knows no device and no file: those are the run's and the callbacks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.schema import RunConfig
from lockstep.data.loader import Collate
from lockstep.data.order import Order
from lockstep.engine.run import Run
from lockstep.engine.stepper import needs_closure
from lockstep.errors import ConfigError
from lockstep.tasks.callbacks import Callback, UserCallbacks
from lockstep.tasks.measure import loss_and_values
from lockstep.tasks.task import Task, defines


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
    """Trains until a limit is reached. Returns why it stopped before that, if it did. `callbacks` validate, schedule
    and, last, save. An `unfinished` run was left during the validation of its last step: it begins with that."""
    limits = config.train
    if unfinished and (stop := _after_user_callbacks(run, callbacks, own)):
        return stop
    if own.reason is not None:  # the run was ended before it could stop for it
        return own.reason
    training_step, lengths = step_of(task), limits.sequence_lengths
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
            progress = run.progress
            if limits.is_done(progress.step, progress.tokens):
                return None
            if lengths is not None:
                batch = task.cut(batch, lengths.at(progress.step, progress.tokens))
            for callback in callbacks:
                callback.before_batch(run, batch)
            own.before_batch(run, batch)
            complete = training_step(run, task, batch)
            own.after_batch(run, batch)
            if not complete:
                continue
            own.after_step(run)
            stop = _after_user_callbacks(run, callbacks, own)
            if stop or limits.is_done(progress.step, progress.tokens):
                return stop
    return run.stopped


def _after_user_callbacks(run: Run, callbacks: Sequence[Callback], own: UserCallbacks) -> str | None:
    *before, saving = callbacks
    reasons = [callback.after_step(run) for callback in before]
    own.after_epoch(run)
    own.reason = own.reason or next((reason for reason in reasons if reason), None)
    saving.after_step(run)  # last, so that it has everything that was done for the step
    return own.reason


def step_of(task: Task) -> Callable[[Run, Task, Any], bool]:
    """Returns what trains on a batch; it returns whether the batch was complete."""
    return _task_step if defines(task, "training_step") else _loss_step


def _loss_step(run: Run, task: Task, batch: Any) -> bool:
    """Computes the loss and steps the optimizer."""
    if run.optimizer is None or not needs_closure(run.optimizer):
        _log_loss(run, *_compute_loss(run, task, batch))
        return run.step()
    computed: list[tuple[Any, dict[str, Any]]] = []  # by the closure, several times: the first is logged
    stepped = run.step(closure=lambda: computed.append(_compute_loss(run, task, batch)))
    _log_loss(run, *computed[0])
    return stepped


def _compute_loss(run: Run, task: Task, batch: Any) -> tuple[Any, dict[str, Any]]:
    with run.autocast():
        loss, values = loss_and_values(task.loss(run.model, batch), task)
    run.backward(loss)
    return loss, values


def _log_loss(run: Run, loss: Any, values: dict[str, Any]) -> None:
    run.log(**{"train/loss": loss}, **{f"train/{name}": value for name, value in values.items()})


def _task_step(run: Run, task: Task, batch: Any) -> bool:
    """Calls the task's training_step and logs what it returns."""
    before, complete = run.progress.step, run.completes_batch
    values = task.training_step(run, batch) or {}
    if complete and run.progress.step == before:
        raise ConfigError(
            f"task: {type(task).__name__}.training_step did not step any optimizer: call run.backward(loss) and "
            "run.step(optimizer) in it"
        )
    run.log(**{name if "/" in name else f"train/{name}": value for name, value in values.items()})
    return complete
