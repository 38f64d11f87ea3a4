"""Checks what a config names against the task once it is made: names of parameters, of metrics and of data.

The model is made of fake tensors, which take no memory. What cannot be known that way is left to the ranks, which check
everything again before the first step.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate

from lockstep.config.schema import After, Keep, RunConfig, Schedule
from lockstep.data.sources import is_stream
from lockstep.errors import ConfigError
from lockstep.runtime.moving import map_tensors
from lockstep.train.early_stop import epoch_name
from lockstep.train.freezing import freeze
from lockstep.train.groups import parameter_groups
from lockstep.train.measuring import loss_and_values
from lockstep.train.models import DEFAULT
from lockstep.train.predicting import require_predict
from lockstep.train.task import Task, create_task, defines, has_loss, has_training_step
from lockstep.train.trained import data_named
from lockstep.train.trainer import check_metrics, datasets_of, metrics_asked_for

# Methods of a task that return metrics by name.
_NAMING = ("loss", "evaluate_step", "metrics", "torchmetrics", "whole_set")


def check_made(config: RunConfig) -> None:
    """Raises ConfigError for a name that the task, its model or its metrics do not have."""
    task = _unless_it_fails(lambda: create_task(config.task))
    if task is None:
        return
    if config.after is not None:
        _check_after(task, config, config.after)
        return
    groups = config.optimizer.groups if config.optimizer is not None else None
    asked = [each for each in _metrics_asked_for(config) if not _may_be_there(task, each[1])]
    if not (config.train.freeze or groups or asked):
        return
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        made = _unless_it_fails(task.model)
    if made is None:
        return
    models = dict(made) if isinstance(made, Mapping) else {DEFAULT: made}
    if config.train.freeze:
        freeze(models, config.train.freeze)
    if groups:
        parameter_groups(models, groups)
    if asked:
        names = _unless_it_fails(lambda: _metric_names(task, made, config, fake))
        if names is not None:
            open_ended = ["train"] if has_training_step(task) else []
            check_metrics(asked, dict.fromkeys(names, 0.0), open_ended)


def _unless_it_fails(make: Any) -> Any:
    """Leaves errors of the user's own code to the ranks, which show a traceback, and so what fake tensors cannot do."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception:
        return None


def _check_after(task: Task, config: RunConfig, after: After) -> None:
    if after.do == "predict":
        require_predict(task, after)
    if after.input is not None:
        return
    split = config.data.split
    has = {kind: defines(task, f"{kind}_data") or bool(split and getattr(split, kind)) for kind in ("val", "test")}
    is_there = any(has.values()) if after.data is None else has.get(after.data)
    if not is_there and not callable(getattr(task, f"{after.data}_data", None)):
        _unless_it_fails(lambda: data_named(task, config, after.data))


def _metrics_asked_for(config: RunConfig) -> list[tuple[str, str]]:
    monitor = None if config.scheduler is None or isinstance(config.scheduler, Schedule) else config.scheduler.monitor
    asked = metrics_asked_for(config, [monitor] if monitor is not None else [])
    return [each for each in asked if each != ("checkpoint.keep.metric", Keep().metric)]


def _may_be_there(task: Task, name: str) -> bool:
    """Whether the name is written in the methods that return metrics: then nothing has to be measured."""
    last = name.rpartition("/")[2].removeprefix("epoch_")
    if name in ("val/loss", "train/epoch_loss"):
        return has_loss(task) or has_training_step(task)
    written = {text for method in _NAMING for cls in type(task).__mro__ for text in _texts(vars(cls).get(method))}
    return last in written and (name.startswith("train/epoch_") or not name.startswith("train/"))


def _texts(function: Any) -> Iterator[str]:
    """Every string that the code of a function has in it."""
    waiting: list[Any] = [getattr(function, "__code__", None)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, (tuple, frozenset)):
            waiting += each
        elif isinstance(each, types.CodeType):
            waiting += each.co_consts


def _metric_names(task: Task, made: Any, config: RunConfig, fake: FakeTensorMode) -> set[str] | None:
    """The names of all metrics, by measuring a batch on fake tensors; None where that does not tell them all."""
    if defines(task, "whole_set") or defines(task, "torchmetrics"):
        return None
    datasets = datasets_of(task, config)
    validated = [name for name in datasets if name.partition("/")[0] == "val"]
    data: Any = datasets[validated[0] if validated else "train"]
    if is_stream(data):
        return None
    examples = [data[index] for index in range(min(len(data), config.train.batch_size))]
    batch = map_tensors(fake.from_tensor, getattr(task, "collate", default_collate)(examples), lambda other: other)
    beside: set[str] = set()
    models: list[nn.Module] = list(made.values()) if isinstance(made, Mapping) else [made]
    for each in models:
        each.eval()
    with fake, torch.no_grad():
        if has_loss(task):
            beside = set(loss_and_values(task.loss(made, batch), task)[1])
        if defines(task, "evaluate_step"):
            returned = task.evaluate_step(made, batch)
            measured = set(returned[0] if isinstance(returned, tuple) else returned)
        else:
            measured = {*task.metrics(made, batch), *beside, *(["loss"] if has_loss(task) else [])}
    trained = {epoch_name(f"train/{name}") for name in ("loss", *beside)}
    return trained | {f"{each}/{name}" for each in validated for name in measured}
