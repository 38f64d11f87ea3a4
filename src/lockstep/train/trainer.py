"""From a config to a trained model: makes the task's parts, trains, and tells how it went."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.checkpoint.retention import Saved, best_first
from lockstep.config.schema import EVERY_EPOCH, Component, Keep, RunConfig
from lockstep.config.values import Interval
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.order import split_dataset
from lockstep.data.sources import check_stream, is_stream
from lockstep.errors import ConfigError
from lockstep.train.changed import OptimizerArguments, apply_changes
from lockstep.train.early_stop import EarlyStopping, known_as, unknown_metric
from lockstep.train.evaluation import BatchMean, Measure
from lockstep.train.hooks import Checkpointing, Hook, Schedule, Validation
from lockstep.train.lengths import Lengths
from lockstep.train.loop import train
from lockstep.train.mean import Mean
from lockstep.train.models import DEFAULT
from lockstep.train.run import Run
from lockstep.train.stepper import loss_and_count
from lockstep.train.task import (
    Task,
    construct,
    create_task,
    has_init_weights,
    has_loss,
    has_training_step,
    import_object,
)

logger = logging.getLogger(__name__)

Datasets = dict[str, Dataset[Any]]


def fit(run: Run, config: RunConfig) -> dict[str, Any]:
    """Train the config's task in this run, from its newest checkpoint if it has one; the metrics it ended with."""
    task = create_task(config.task)
    datasets = _datasets(task, config)
    collate: Collate | None = getattr(task, "collate", None)
    schedulers, every = _set_up(run, task, config)
    measure = _measure(run, task)
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
    run.journal.begin(run.progress, _total_steps(config, _length(datasets["train"])))
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


def _set_up(run: Run, task: Task, config: RunConfig) -> tuple[dict[str, Any], Interval]:
    """Every model of the task with its optimizer and scheduler; the schedulers, and how often they are stepped."""
    limits = config.train
    made = run.build(task.model)
    models = dict(made) if isinstance(made, Mapping) else {DEFAULT: made}
    optimizers = _per_model(models, _optimizers(task, made, models, config), "optimizer")
    schedulers, every = _schedulers(task, made, optimizers, config)
    for name, model in models.items():
        run.setup(
            model,
            optimizers.get(name),
            schedulers.get(name),
            name=name,
            precision=limits.precision,
            clip_norm=limits.clip_norm,
            compile=limits.compile,
            recompute=limits.recompute,
            on_nan=limits.on_nan,
            shard=task.shard_rules(),
            init_weights=task.init_weights if has_init_weights(task) else None,
        )
    return schedulers, every


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


def _datasets(task: Task, config: RunConfig) -> Datasets:
    """Training, validation and test data: the task's own, or parts of its training data by the config's fractions."""
    train_data = task.train_data()
    _check(train_data, "train_data()")
    streams = is_stream(train_data)
    if config.data.shuffle_buffer is not None and not streams:
        raise ConfigError(
            f"data.shuffle_buffer: {config.data.shuffle_buffer} is for streams, and train_data() is a "
            f"{type(train_data).__name__}, all of which is shuffled (data.shuffle): take it away"
        )
    own = {name: data for name, data in (("val", task.val_data()), ("test", task.test_data())) if data is not None}
    for name, data in own.items():
        _check(data, f"{name}_data()")
    fractions = config.data.split
    if fractions is not None and streams:
        raise ConfigError(
            f"data.split: train_data() is a stream ({type(train_data).__name__}), of which nobody knows how long it is "
            "or can take any part: give the task val_data() and test_data() of its own (other files, other shards)"
        )
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
        known = {name: _length(each) for name, each in datasets.items() if name != "train"}
        return Lengths(None, {name: count for name, count in known.items() if count is not None})
    own = {name: _length(each) for name, each in datasets.items() if not getattr(fractions, name)}
    split = [_length(each) or 0 for name, each in datasets.items() if name not in own]
    return Lengths(sum(split), {name: count for name, count in own.items() if count is not None})  # nothing is left out


def _check(data: Any, name: str) -> None:
    if is_stream(data):
        check_stream(data, f"task: {name}")
    else:
        check_dataset(data, name)


def _length(dataset: Dataset[Any]) -> int | None:
    """How many examples there are; None of a stream."""
    return None if is_stream(dataset) else len(dataset)  # type: ignore[arg-type]


def _optimizers(task: Task, made: Any, models: Mapping[str, nn.Module], config: RunConfig) -> Any:
    """One optimizer, or one for every model: of the config, else of the task, else AdamW."""
    if config.optimizer is None:
        own = task.optimizer(made)
        return own if own is not None else {name: torch.optim.AdamW(each.parameters()) for name, each in models.items()}
    return {
        name: _made(config.optimizer, "optimizer", Optimizer, [p for p in each.parameters() if p.requires_grad])
        for name, each in models.items()
    }


def _schedulers(
    task: Task, made: Any, optimizers: Mapping[str, Optimizer], config: RunConfig
) -> tuple[dict[str, Any], Interval]:
    given: Any = dict(optimizers) if isinstance(made, Mapping) else next(iter(optimizers.values()))
    if config.scheduler is None:
        return _per_model(optimizers, task.scheduler(given), "scheduler"), EVERY_EPOCH
    scheduler = config.scheduler
    return {name: _made(scheduler, "scheduler", object, each) for name, each in optimizers.items()}, scheduler.every


def _per_model(models: Mapping[str, Any], given: Any, what: str) -> dict[str, Any]:
    """What a task returned for its models, by the name of the model."""
    if not isinstance(given, Mapping):
        if given is not None and len(models) > 1:
            raise ConfigError(
                f"task: model() returned {len(models)} models ({', '.join(models)}), but {what}() one "
                f"{type(given).__name__}: return a mapping with one for each of them"
            )
        return {} if given is None else {next(iter(models)): given}
    unknown = [name for name in given if name not in models]
    if unknown:
        raise ConfigError(f"task: {what}() names {unknown[0]!r}, but the models are {', '.join(models)}")
    return dict(given)


def _made(component: Component, path: str, kind: type, *positional: Any) -> Any:
    made = construct(import_object(component.type, path), component.arguments, path, *positional)
    if not isinstance(made, kind):
        raise ConfigError(f"{path}: {component.type} makes a {type(made).__name__}, not a {kind.__name__}")
    return made


def _measure(run: Run, task: Task) -> Measure:
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


def _total_steps(config: RunConfig, examples: int | None) -> int | None:
    limits = config.train
    if limits.steps is not None:
        return limits.steps
    if examples is None:
        return None
    whole, rest = divmod(examples, limits.batch_size)
    per_epoch = whole + (1 if rest and not config.data.drop_last else 0)
    return per_epoch * limits.epoch_limit if limits.epoch_limit is not None else None


def _best(history: list[dict[str, float]], config: RunConfig) -> dict[str, Any] | None:
    keep = config.checkpoint.keep
    metric = known_as(keep.metric, {name for each in history for name in each})
    saved = [Saved(int(each["step"]), each[metric]) for each in history if metric in each] if metric else []
    best = best_first(saved, keep.mode)
    return {"metric": metric, "value": best[0].value, "step": best[0].step} if best else None
