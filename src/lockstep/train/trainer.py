"""From a config to a trained model: makes the task's parts, trains, and tells how it went."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.checkpoint.retention import Saved, best_first
from lockstep.config.schema import Component, RunConfig
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.order import split_dataset
from lockstep.errors import ConfigError
from lockstep.train.early_stop import EarlyStopping
from lockstep.train.evaluation import Measure
from lockstep.train.hooks import Checkpointing, Hook, Schedule, Validation
from lockstep.train.loop import train
from lockstep.train.run import Run
from lockstep.train.task import Task, construct, create_task, import_object

logger = logging.getLogger(__name__)

Datasets = dict[str, Dataset[Any]]


def fit(run: Run, config: RunConfig) -> dict[str, Any]:
    """Train the config's task in this run, from its newest checkpoint if it has one; the metrics it ended with."""
    task = create_task(config.task)
    datasets = _datasets(task, config)
    collate: Collate | None = getattr(task, "collate", None)
    model = task.model()
    optimizer = _optimizer(task, model, config)
    scheduler, every = _scheduler(task, optimizer, config)
    limits = config.train
    run.setup(
        model,
        optimizer,
        scheduler,
        precision=limits.precision,
        clip_norm=limits.clip_norm,
        compile=limits.compile,
        on_nan=limits.on_nan,
        shard=task.shard_rules(),
    )

    measure = _measure(run, task)
    batch_size = config.validation.batch_size or limits.batch_size
    stopping = EarlyStopping(config.early_stop) if config.early_stop else None
    validation = Validation(
        datasets.get("val"), measure, batch_size, config.validation, stopping, collate, task.should_stop
    )
    checkpointing = Checkpointing(config.checkpoint, validation)
    run.attach("validation", validation)
    hooks: list[Hook] = [validation, checkpointing]
    if scheduler is not None:
        monitor = config.scheduler.monitor if config.scheduler else None
        hooks.insert(1, Schedule(scheduler, every, monitor, validation))

    run.restore()
    run.journal.begin(run.progress, _total_steps(config, len(datasets["train"])))  # type: ignore[arg-type]
    stopped = train(run, task, datasets["train"], collate, config, hooks)
    if stopped:
        logger.info("stopped early at step %d: %s", run.progress.step, stopped)
    validation.validate(run)
    checkpointing.save(run)
    metrics = dict(validation.latest)
    if "test" in datasets:
        found = run.evaluate(
            measure, datasets["test"], batch_size, on=config.validation.on, collate=collate, name="test"
        )
        tested = {f"test/{name}": value for name, value in found.items()}
        run.journal.write(run.progress, tested)
        metrics.update(tested)
    return {
        "status": "stopped early" if stopped else "completed",
        "reason": stopped,
        "metrics": metrics,
        "best": _best(validation.history, config),
    }


def _datasets(task: Task, config: RunConfig) -> Datasets:
    """Training, validation and test data: the task's own, or parts of its training data by the config's fractions."""
    train_data = task.train_data()
    check_dataset(train_data, "train_data()")
    own = {name: data for name, data in (("val", task.val_data()), ("test", task.test_data())) if data is not None}
    for name, data in own.items():
        check_dataset(data, f"{name}_data()")
    fractions = config.data.split
    if fractions is None:
        return {"train": train_data, **own}
    asked = {"train": fractions.train, "val": fractions.val, "test": fractions.test}
    both = [name for name in own if asked[name] > 0]
    if both:
        raise ConfigError(
            f"data.split.{both[0]}: {asked[both[0]]:g}, but the task has {both[0]}_data() of its own: "
            "take one of them away"
        )
    parts = split_dataset(train_data, asked, config.seed)
    if "train" not in parts:
        raise ConfigError(
            f"data.split: {asked['train']:g} of {len(train_data)} examples leaves none to train on"  # type: ignore[arg-type]
        )
    return {**parts, **own}


def _optimizer(task: Task, model: nn.Module, config: RunConfig) -> Optimizer:
    if config.optimizer is None:
        return task.optimizer(model) or torch.optim.AdamW(model.parameters())
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer: Optimizer = _made(config.optimizer, "optimizer", Optimizer, parameters)
    return optimizer


def _scheduler(task: Task, optimizer: Optimizer, config: RunConfig) -> tuple[Any, Any]:
    from lockstep.config.schema import EVERY_EPOCH

    if config.scheduler is None:
        return task.scheduler(optimizer), EVERY_EPOCH
    return _made(config.scheduler, "scheduler", object, optimizer), config.scheduler.every


def _made(component: Component, path: str, kind: type, *positional: Any) -> Any:
    made = construct(import_object(component.type, path), component.arguments, path, *positional)
    if not isinstance(made, kind):
        raise ConfigError(f"{path}: {component.type} makes a {type(made).__name__}, not a {kind.__name__}")
    return made


def _measure(run: Run, task: Task) -> Measure:
    """The task's loss and metrics through the bare module, so that a rank may measure alone."""

    def measure(batch: Any) -> Mapping[str, Tensor]:
        module = run.module
        with run.autocast():
            return {"loss": task.loss(module, batch), **task.metrics(module, batch)}

    return measure


def _total_steps(config: RunConfig, examples: int) -> int | None:
    limits = config.train
    if limits.steps is not None:
        return limits.steps
    whole, rest = divmod(examples, limits.batch_size)
    per_epoch = whole + (1 if rest and not config.data.drop_last else 0)
    return per_epoch * limits.epoch_limit if limits.epoch_limit is not None else None


def _best(history: list[dict[str, float]], config: RunConfig) -> dict[str, Any] | None:
    keep = config.checkpoint.keep
    for metric in (keep.metric, keep.metric.removeprefix("val/")):
        saved = [Saved(int(each["step"]), each[metric]) for each in history if metric in each]
        if saved:
            best = best_first(saved, keep.mode)
            return {"metric": metric, "value": best[0].value, "step": best[0].step} if best else None
    return None
