"""The loop. It knows no device and no file: those are the run's and the hooks'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.schema import RunConfig
from lockstep.data.loader import Collate
from lockstep.train.hooks import Hook
from lockstep.train.run import Run
from lockstep.train.task import Task


def train(
    run: Run, task: Task, data: Dataset[Any], collate: Collate | None, config: RunConfig, hooks: Sequence[Hook]
) -> str | None:
    """Train until a limit is reached; returns why it stopped before that, if it did."""
    limits, model = config.train, run.model
    for _ in run.epochs(limits.epoch_limit):
        batches = run.batches(
            data,
            limits.batch_size,
            shuffle=config.data.shuffle,
            drop_last=config.data.drop_last,
            accumulate=limits.accumulate,
            collate=collate,
        )
        for batch in batches:
            if limits.steps is not None and run.progress.step >= limits.steps:
                return None
            with run.autocast():
                loss = task.loss(model, batch)
            run.log(loss=loss)
            run.backward(loss)
            if not run.step():
                continue
            reasons = [hook.after_step(run) for hook in hooks]
            stop = next((reason for reason in reasons if reason), None)
            if stop or run.progress.step == limits.steps:
                return stop
    return run.stopped
