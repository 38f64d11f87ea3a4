"""Trainer: makes the parts of a config's task, trains, and returns the outcome."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from lockstep.checkpoint.retention import Saved, best_first
from lockstep.config.schema import Keep, RunConfig
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.permutation import First, split_dataset
from lockstep.data.source import Source, makes_batches, taken
from lockstep.data.stream_reader import check_stream, is_stream
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.tasks.callbacks import Callback, UserCallbacks, own_callbacks
from lockstep.tasks.changes import OptimizerArguments, SplitLength
from lockstep.tasks.create import create_task
from lockstep.tasks.loop import train
from lockstep.tasks.measure import TaskMeasure
from lockstep.tasks.parameters import log_summary
from lockstep.tasks.schedules import Scheduling, run_length
from lockstep.tasks.setup import order_of, ramps_of, set_up
from lockstep.tasks.task import Task, defines
from lockstep.tasks.validation import (
    Checkpointing,
    EarlyStopping,
    Validation,
    epoch_name,
    evaluated,
    known_as,
    metric_value,
    unknown_metric,
)

logger = logging.getLogger(__name__)

Datasets = dict[str, Dataset[Any]]


def fit(run: Run, config: RunConfig, task: Task | None = None) -> dict[str, Any]:
    """Trains the config's task in this run, from its newest checkpoint if it has one. Returns the outcome."""
    task = task or create_task(config.task)
    task.begin(run, config)
    own = UserCallbacks(own_callbacks(task, config))
    try:
        return _fit(run, config, task, own)
    except Exception as error:
        own.after_exception(run, error)
        raise


def _fit(run: Run, config: RunConfig, task: Task, own: UserCallbacks) -> dict[str, Any]:
    whole = datasets_of(task, config)
    datasets = limited(whole, config)
    order = order_of(task, config, datasets["train"])
    collate: Collate | None = getattr(task, "collate", None)
    ramps = run._engine.feed.ramps = ramps_of(task, config, datasets["train"], order)
    length = run_length(config, order.length if order is not None else None, ramps)
    schedules = set_up(run, task, config, length)
    if run.is_main:
        log_summary(run.modules, run._engine.strategy.name)
    measure = TaskMeasure(run, task)
    batch_size = config.evaluation_batch_size
    stopping = EarlyStopping(config.early_stop) if config.early_stop else None
    validation = Validation(
        _of_kind("val", datasets), measure, batch_size, config.validation, stopping, collate, task.should_stop,
        own.after_validation,
    )  # fmt: skip
    scheduling = Scheduling(list(schedules.values()), validation)
    monitored = getattr(task, "monitored", None)  # what an adapter judges checkpoints by
    checkpointing = Checkpointing(config.checkpoint, validation, monitored)
    run.register_state("validation", validation)
    own.register_state(run)

    arguments = OptimizerArguments(config.optimizer)
    run.register_state("optimizer arguments", arguments)
    run.register_state("split length", SplitLength(_split_length(whole, config)))
    run.register_state("run length", length)
    run.restore()
    _tell(task, "after_setup", run)
    for name, optimizer in run.optimizers.items():
        scheduler = schedules[name].scheduler if name in schedules else None
        for change in arguments.apply(optimizer, scheduler):
            logger.info(change)
    asked = metrics_asked_for(config, scheduling.monitors)
    asked = [each for each in asked if monitored is None or each[0] != "checkpoint.keep.metric"]
    there, complete = _metric_names(run, measure, datasets, batch_size, collate, asked)
    open_ended = {"train": defines(task, "training_step"), "val": not complete}
    check_metrics(asked, there, [kind for kind, is_open in open_ended.items() if is_open])
    run._engine.aggregator.begin(run.progress, length.steps)
    own.before_training(run)
    own.watch_optimizers(run)
    unfinished = validation.unfinished is not None and validation.unfinished == run.progress.step
    callbacks: list[Callback] = [validation, scheduling, checkpointing]
    stopped = train(run, task, datasets["train"], collate, config, callbacks, own, unfinished, order)
    if stopped:
        logger.info("stopped early at step %d: %s", run.progress.step, stopped)
    own.reason = stopped
    _tell(task, "after_loop", run)
    validation.validate(run)
    checkpointing.save(run)
    metrics: dict[str, Any] = dict(validation.latest)
    if test_data := _of_kind("test", datasets):
        tested = evaluated(run, measure, test_data, batch_size, config.validation.on, collate)
        if tested is None:
            run._engine.leave()
        run._engine.aggregator.write(run.progress, tested)
        metrics.update(tested)
    own.have_stopped(run)
    own.after_training(run, dict(metrics))
    return {
        "status": "stopped early" if stopped else "completed",
        "reason": stopped,
        "metrics": {name: value for name, value in metrics.items() if not isinstance(value, list)},
        "best": _best(validation.history, config) if monitored is None else monitored.best,
    }


def _tell(task: Task, moment: str, run: Run) -> None:
    """Calls what an adapter has for moments that callbacks are not called at."""
    if (told := getattr(task, moment, None)) is not None:
        told(run)


def metrics_asked_for(config: RunConfig, monitors: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the metrics that the config names, each with the path of its setting."""
    keep, stopping = config.checkpoint.keep, config.early_stop
    asked = [("checkpoint.keep.metric", keep.metric)] if keep.best else []
    asked += [(f"early_stop.criteria[{index}].metric", each.metric)
              for index, each in enumerate(stopping.criteria if stopping else ())]  # fmt: skip
    return asked + [("scheduler.monitor", each) for each in monitors]


def _metric_names(
    run: Run,
    measure: TaskMeasure,
    datasets: Datasets,
    batch_size: int,
    collate: Collate | None,
    asked: Sequence[tuple[str, str]],
) -> tuple[dict[str, Any], bool]:
    """Returns the metrics of the run by name, each with a value that is a number or a list, and whether these are all.

    They are found on one batch: of data that is measured, or of training data, where the config names one."""
    there: dict[str, Any] = {epoch_name("train/loss"): 0.0}
    validated, tested = _of_kind("val", datasets), _of_kind("test", datasets)
    tried = validated or (tested if measure.epoch_metrics is not None else {})
    if not tried and any(known_as(name, there) is None for _, name in asked):
        tried = _of_kind("train", datasets)
    if not tried:
        return there, True
    complete = True
    for prefix, data in tried.items():
        found, is_all = run._engine.evaluator.names_of(measure, data, batch_size, collate)
        complete = complete and is_all
        there.update({f"{prefix}/{name}": each for name, each in found.items() if prefix in validated})
    if measure.one_pass and any(name.startswith("train/") and name not in there for _, name in asked):
        run._engine.evaluator.names_of(measure.of_loss, datasets["train"], batch_size, collate)
    there.update({epoch_name(f"train/{name}"): 0.0 for name in measure.beside_loss})
    return there, complete


def check_metrics(asked: Sequence[tuple[str, str]], there: Mapping[str, Any], open_ended: Sequence[str] = ()) -> None:
    """Refuses a metric that will never be there, before the first step.

    `open_ended` has `train` where a training_step logs what is not known before, and `val` where a metric of a whole
    set had no value for one batch.
    """
    for path, name in asked:
        default = path == "checkpoint.keep.metric" and name == Keep().metric
        if known_as(name, there) is not None:
            metric_value(there, name, path)  # refuses what is no single number
        elif default:
            several = sorted(each for each in there if each.startswith("val/") and each.endswith("/loss"))
            if several:
                logger.warning(
                    "checkpoint.keep.metric: there are several validation sets, and no %s: no checkpoint is kept as "
                    "the best. Name one of %s", name, ", ".join(several),
                )  # fmt: skip
        elif ("val" if name.startswith("val/") else "train") not in open_ended:
            raise ConfigError(unknown_metric(path, name, there))
        elif not name.startswith("val/") and "/" in name and not name.rpartition("/")[2].startswith("epoch_"):
            raise ConfigError(f"{path}: {name} is the mean since the last row: name {epoch_name(name)}, that since the "
                              "last validation")  # fmt: skip


def datasets_of(task: Task, config: RunConfig) -> Datasets:
    """Returns training, validation and test data: of the task, or parts of its training data by `data.split`.

    Their names are the prefixes of their metrics: `train`, `val`, `test`, and `val/NAME` where there are several.
    """
    train_data = without_loader(task, config, task.train_data(), "train_data()", trains=True)
    check_data(train_data, "task: train_data()")
    streams = is_stream(train_data)
    if config.data.shuffle_buffer is not None and not streams:
        raise ConfigError(
            f"data.shuffle_buffer: {config.data.shuffle_buffer} is for streams, and train_data() is a "
            f"{type(train_data).__name__}, all of which is shuffled (data.shuffle): take it away"
        )
    own = {kind: each for kind, made in (("val", task.val_data()), ("test", task.test_data()))
           for kind, each in _named(kind, made, task, config).items()}  # fmt: skip
    fractions = config.data.split
    if fractions is not None and streams:
        raise ConfigError(
            f"data.split: train_data() is a stream ({type(train_data).__name__}), of which nobody knows how long it is "
            "or can take any part: give the task val_data() and test_data() of its own (other files, other shards)"
        )
    if fractions is None:
        return {"train": train_data, **own}
    asked = {"train": fractions.train, "val": fractions.val, "test": fractions.test}
    both = [kind for kind in (name.partition("/")[0] for name in own) if asked[kind] > 0]
    if both:
        raise ConfigError(
            f"data.split.{both[0]}: {asked[both[0]]:g}, but the task has {both[0]}_data() of its own: "
            "take one of them away"
        )
    parts = split_dataset(train_data, asked, config.seed, in_order=not config.data.shuffle)
    if "train" not in parts:
        raise ConfigError(f"data.split: {asked['train']:g} of {len(train_data)} examples leaves none to train on")
    return {**parts, **own}


def limited(datasets: Datasets, config: RunConfig) -> Datasets:
    """Returns the parts that `train.limit`, `train.overfit` and `validate.limit` leave to train on and to measure."""
    overfit = config.train.overfit
    limits = {"train": ("train.limit", config.train.limit), **dict.fromkeys(("val", "test"), ("validate.limit",
              config.validation.limit))}  # fmt: skip
    found = dict(datasets)
    if overfit is not None:
        trained_on = _first(datasets["train"], overfit, "train", "train.overfit")
        logger.info("train.overfit: training on %d examples, in their order, and validating on the same", overfit)
        of_val = _of_kind("val", datasets) or ("val",)
        found.update(dict.fromkeys(("train", *of_val), trained_on))
    for name, dataset in datasets.items():
        setting, limit = limits[name.partition("/")[0]]
        if limit is not None and found[name] is dataset:
            found[name] = _first(dataset, limit, name, setting)
            logger.info("%s: %d of %d examples of %s", setting, len(found[name]), len(dataset), name)  # type: ignore[arg-type]
    return found


def _first(dataset: Dataset[Any], count: int, name: str, setting: str) -> Dataset[Any]:
    if is_stream(dataset):
        raise ConfigError(
            f"{setting}: {count}: the {name} data is a stream ({type(dataset).__name__}), of which ranks read parts of "
            f"their own: set {setting} to null, and return a shorter stream in the task"
        )
    return First(dataset, count)


def without_loader(task: Task, config: RunConfig, made: Any, name: str, trains: bool = False) -> Any:
    """Returns the data of a DataLoader, and has the task remember its collate_fn and, to train with, its order."""
    if not makes_batches(made) and not trains:
        return made
    source = taken(made, config.seed, False) if makes_batches(made) else Source(made, config.train.batch_size)
    if not hasattr(type(task), "collate"):
        if vars(task).setdefault("_collate_of_loader", source.collate) != source.collate:
            raise ConfigError(
                f"task: the DataLoader of {name} has another collate_fn than the other data: define "
                "collate(self, examples) in the task, which is used for all"
            )
        if source.collate is not None:
            vars(task)["collate"] = source.collate
    if not trains:
        return source.examples
    of_loader: dict[str, Any] = {"train.batch_size": source.batch_size, "data.drop_last": source.drop_last}
    of_config = {"train.batch_size": config.train.batch_size, "data.drop_last": config.data.drop_last}
    if is_stream(source.dataset):
        of_loader["data.shuffle"], of_config["data.shuffle"] = False, config.data.shuffle
    for path in of_loader if makes_batches(made) else ():
        if of_loader[path] != of_config[path]:
            raise ConfigError(
                f"{path}: {of_config[path]}, but train_data() returns a DataLoader with {of_loader[path]}: set {path} "
                "as it has it (a batch is that of all processes together), or return its dataset"
            )
    vars(task)["_order_of_loader"] = source.order
    return source.dataset


def _named(kind: str, given: Any, task: Task, config: RunConfig) -> Datasets:
    """Returns the datasets of `val_data` or `test_data` by name: none, one or several."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = without_loader(task, config, given, f"{kind}_data()")
        check_data(given, f"task: {kind}_data()")
        return {kind: given}
    given = {name: without_loader(task, config, each, f"{kind}_data()") for name, each in given.items()}
    if not given:
        raise ConfigError(f"task: {kind}_data() returned a mapping without any dataset: return None, or some by name")
    for name, each in given.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"task: {kind}_data() has a dataset under {name!r}: a name is text without a slash")
        check_data(each, f"task: {kind}_data()[{name!r}]")
    return {f"{kind}/{name}": each for name, each in given.items()}


def _of_kind(kind: str, datasets: Datasets) -> Datasets:
    return {name: each for name, each in datasets.items() if name.partition("/")[0] == kind}


def _split_length(datasets: Datasets, config: RunConfig) -> int | None:
    """Returns the number of examples that data.split divides; it leaves none out."""
    fractions = config.data.split
    if fractions is None:
        return None
    return sum(_length(each) or 0 for name, each in datasets.items() if getattr(fractions, name.partition("/")[0]))


def check_data(data: Any, name: str) -> None:
    if is_stream(data):
        check_stream(data, name)
    else:
        check_dataset(data, name)


def _length(dataset: Dataset[Any]) -> int | None:
    return None if is_stream(dataset) else len(dataset)  # type: ignore[arg-type]


def _best(history: list[dict[str, float]], config: RunConfig) -> dict[str, Any] | None:
    keep = config.checkpoint.keep
    metric = known_as(keep.metric, {name for each in history for name in each})
    saved = [Saved(int(each["step"]), each[metric]) for each in history if metric in each] if metric else []
    best = best_first(saved, keep.mode)
    return {"metric": metric, "value": best[0].value, "step": best[0].step} if best else None
