"""From a config to a trained model: makes the task's parts, trains, and tells how it went."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from lockstep.checkpoint.retention import Saved, best_first
from lockstep.config.schema import Keep, RunConfig
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.order import split_dataset
from lockstep.errors import ConfigError
from lockstep.train.changed import OptimizerArguments, apply_changes
from lockstep.train.early_stop import EarlyStopping, known_as, unknown_metric
from lockstep.train.evaluation import BatchMean, Measure
from lockstep.train.hooks import Checkpointing, Hook, Schedule, Validation
from lockstep.train.lengths import Lengths
from lockstep.train.loop import train
from lockstep.train.making import set_up
from lockstep.train.mean import Mean
from lockstep.train.run import Run
from lockstep.train.stepper import loss_and_count
from lockstep.train.task import (
    Task,
    create_task,
    has_loss,
    has_training_step,
)

logger = logging.getLogger(__name__)

Datasets = dict[str, Dataset[Any]]


def fit(run: Run, config: RunConfig) -> dict[str, Any]:
    """Train the config's task in this run, from its newest checkpoint if it has one; the metrics it ended with."""
    task = create_task(config.task)
    datasets = datasets_of(task, config)
    collate: Collate | None = getattr(task, "collate", None)
    schedulers, every = set_up(run, task, config)
    measure = measure_of(run, task)
    batch_size = config.validation.batch_size or config.train.batch_size
    stopping = EarlyStopping(config.early_stop) if config.early_stop else None
    validation = Validation(
        datasets.get("val"), measure, batch_size, config.validation, stopping, collate, task.should_stop
    )
    checkpointing = Checkpointing(config.checkpoint, validation)
    run.attach("validation", validation)
    hooks: list[Hook] = [validation, checkpointing]
    monitor = None
    if schedulers:
        schedule = Schedule(
            list(schedulers.values()), every, config.scheduler.monitor if config.scheduler else None, validation
        )
        hooks.insert(1, schedule)
        monitor = schedule.monitor

    arguments = OptimizerArguments(config.optimizer.arguments if config.optimizer else None)
    run.attach("optimizer arguments", arguments)
    run.attach("lengths", _lengths(datasets, config))
    run.restore()
    for name, optimizer in run.optimizers.items():
        for change in apply_changes(optimizer, schedulers.get(name), arguments.saved, arguments.current):
            logger.info(change)
    measured = run.names_of(measure, datasets["val"], batch_size, collate) if "val" in datasets else []
    check_metrics(config, monitor, [f"val/{name}" for name in measured], has_training_step(task))
    run.journal.begin(run.progress, _total_steps(config, len(datasets["train"])))  # type: ignore[arg-type]
    unfinished = validation.unfinished is not None and validation.unfinished == run.progress.step
    stopped = train(run, task, datasets["train"], collate, config, hooks, unfinished)
    if stopped:
        logger.info("stopped early at step %d: %s", run.progress.step, stopped)
    validation.validate(run)
    checkpointing.save(run)
    metrics = dict(validation.latest)
    if "test" in datasets:
        found = run.evaluate_or_leave(measure, datasets["test"], batch_size, config.validation.on, collate, "test")
        if found is None:
            run.leave()
        tested = {f"test/{name}": value for name, value in found.items()}
        run.journal.write(run.progress, tested)
        metrics.update(tested)
    return {
        "status": "stopped early" if stopped else "completed",
        "reason": stopped,
        "metrics": metrics,
        "best": _best(validation.history, config),
    }


def check_metrics(config: RunConfig, monitor: str | None, validated: list[str], open_ended: bool) -> None:
    """Refuse a metric that will never be there before the first step, not after the first epoch.

    What a task logs in a training step of its own is not known before (`open_ended`).
    """
    keep, stopping = config.checkpoint.keep, config.early_stop
    asked = [("checkpoint.keep.metric", keep.metric)] if keep.best else []
    asked += [(f"early_stop.criteria[{index}].metric", each.metric)
              for index, each in enumerate(stopping.criteria if stopping else ())]  # fmt: skip
    asked += [("scheduler.monitor", monitor)] if monitor else []
    there = ["train/loss", *validated]
    for path, name in asked:
        known = known_as(name, there) is not None
        default = path == "checkpoint.keep.metric" and name == Keep().metric
        if not known and not default and not (open_ended and not name.startswith("val/")):
            raise ConfigError(unknown_metric(path, name, there))


def datasets_of(task: Task, config: RunConfig) -> Datasets:
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


def _lengths(datasets: Datasets, config: RunConfig) -> Lengths:
    fractions = config.data.split
    if fractions is None:
        return Lengths(None, {name: _length(each) for name, each in datasets.items() if name != "train"})
    own = {name: _length(each) for name, each in datasets.items() if not getattr(fractions, name)}
    return Lengths(sum(map(_length, datasets.values())) - sum(own.values()), own)  # a split leaves nothing out


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


def measure_of(run: Run, task: Task) -> Measure:
    """The task's loss and metrics through the bare modules, so that a rank may measure alone."""

    def measure(batch: Any) -> Mapping[str, Any]:
        model: Any = run.module if len(run.modules) == 1 else run.modules
        with run.autocast():
            return {**_loss_of(task, model, batch), **task.metrics(model, batch)}

    return measure


def _loss_of(task: Task, model: Any, batch: Any) -> dict[str, Any]:
    if not has_loss(task):
        return {}
    loss = task.loss(model, batch)
    value, _ = loss_and_count(loss)
    return {"loss": loss if isinstance(loss, Mean) else BatchMean(value)}


def _total_steps(config: RunConfig, examples: int) -> int | None:
    limits = config.train
    if limits.steps is not None:
        return limits.steps
    whole, rest = divmod(examples, limits.batch_size)
    per_epoch = whole + (1 if rest and not config.data.drop_last else 0)
    return per_epoch * limits.epoch_limit if limits.epoch_limit is not None else None


def _best(history: list[dict[str, float]], config: RunConfig) -> dict[str, Any] | None:
    keep = config.checkpoint.keep
    metric = known_as(keep.metric, {name for each in history for name in each})
    saved = [Saved(int(each["step"]), each[metric]) for each in history if metric in each] if metric else []
    best = best_first(saved, keep.mode)
    return {"metric": metric, "value": best[0].value, "step": best[0].step} if best else None
