"""Checks a config before any rank is started: the classes it names, and names of parameters, metrics and data.

The model is made of fake tensors, which take no memory. What cannot be known that way is left to the ranks, which check
everything again before the first step.
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import SGD, Muon, Optimizer
from torch.utils.data import default_collate

from lockstep.config.objects import NotInstalled, check_arguments, import_object, try_on
from lockstep.config.schema import After, Component, Keep, RunConfig, Schedule
from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.data.stream_reader import is_stream
from lockstep.engine.models import DEFAULT
from lockstep.errors import ConfigError
from lockstep.record.logger import check_methods
from lockstep.runtime.moving import map_tensors
from lockstep.tasks.callbacks import callback_class
from lockstep.tasks.create import create_task, task_class
from lockstep.tasks.evaluate import data_named
from lockstep.tasks.measure import loss_and_values
from lockstep.tasks.parameters import OTHERS, freeze, matrices_and_others, parameter_groups
from lockstep.tasks.predict import require_predict
from lockstep.tasks.schedules import AUTO
from lockstep.tasks.task import Task, defines
from lockstep.tasks.trainer import check_metrics, datasets_of, limited, metrics_asked_for
from lockstep.tasks.validation import epoch_name

# Methods of a task that return metrics by name.
_NAMING = ("loss", "evaluate_step", "metrics", "torchmetrics", "epoch_metrics")


def check_made(config: RunConfig) -> None:
    """Raises ConfigError for a name that the task, its model or its metrics do not have."""
    task = _unless_it_fails(lambda: create_task(config.task))
    if task is None:
        return
    if config.after is not None:
        _check_after(task, config, config.after)
        return
    groups = config.optimizer.groups if config.optimizer is not None else None
    others = config.optimizer.others if config.optimizer is not None else None
    asked = [each for each in _metrics_asked_for(config) if not _may_be_there(task, each[1])]
    if not (config.train.freeze or groups or others or asked):
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
    if others is not None:
        matrices_and_others(models, others.match)
    if asked:
        names = _unless_it_fails(lambda: _metric_names(task, made, config, fake))
        if names is not None:
            open_ended = ["train"] if defines(task, "training_step") else []
            check_metrics(asked, dict.fromkeys(names, 0.0), open_ended)


def _unless_it_fails(make: Any) -> Any:
    """Returns None where user code fails, or fake tensors do: ranks show a traceback."""
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
    """Returns whether the methods that return metrics contain the name: then nothing has to be measured."""
    last = name.rpartition("/")[2].removeprefix("epoch_")
    if name in ("val/loss", "train/epoch_loss"):
        return defines(task, "loss") or defines(task, "training_step")
    written = {text for method in _NAMING for cls in type(task).__mro__ for text in _texts(vars(cls).get(method))}
    return last in written and (name.startswith("train/epoch_") or not name.startswith("train/"))


def _texts(function: Any) -> Iterator[str]:
    """Yields every string in the code of a function."""
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
    """Returns the names of all metrics, by measuring a batch on fake tensors; None where these are not all."""
    if defines(task, "epoch_metrics") or defines(task, "torchmetrics"):
        return None
    datasets = limited(datasets_of(task, config), config)
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
        if defines(task, "loss"):
            beside = set(loss_and_values(task.loss(made, batch), task)[1])
        if defines(task, "evaluate_step"):
            returned = task.evaluate_step(made, batch)
            measured = set(returned[0] if isinstance(returned, tuple) else returned)
        else:
            measured = {*task.metrics(made, batch), *beside, *(["loss"] if defines(task, "loss") else [])}
    trained = {epoch_name(f"train/{name}") for name in ("loss", *beside)}
    return trained | {f"{each}/{name}" for each in validated for name in measured}


class CannotImport(ConfigError):
    """What a config names exists, and fails while it is imported."""


# What may well be there on another machine.
ELSEWHERE = (CannotImport, NotInstalled)


def check_parts(config: RunConfig, pass_over: tuple[type[ConfigError], ...] = ()) -> list[str]:
    """Imports what a config names. Raises all problems at once; returns the messages of those to pass over."""
    scheduler = None if isinstance(config.scheduler, Schedule) else config.scheduler
    checks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (_check_task, (config.task,)),
        *([(_check_optimizer, (config.optimizer,))] if config.optimizer is not None else []),
        *([(_check_scheduler, (scheduler,))] if scheduler is not None else []),
        *((_check_callback, (each, f"callbacks[{index}]")) for index, each in enumerate(config.callbacks)),
        *((_check_logger, (Component.model_validate(own.model_dump()), f"log.{name}"))
          for name, own in config.log.own.items()),
    ]  # fmt: skip
    problems: list[str] = []
    passed_over: list[str] = []
    for check, given in checks:
        try:
            check(*given)
        except ConfigError as error:
            (passed_over if isinstance(error, pass_over) else problems).append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return passed_over


def _check_task(component: Component) -> None:
    check_arguments(_imported(component, "task", task_class), component.arguments, "task")


def _check_optimizer(component: OptimizerSettings) -> None:
    cls = _optimizer_class(component, "optimizer")
    others = component.others
    if others is not None:
        if component.groups:
            raise ConfigError(f"optimizer.groups: {OTHERS} divides the parameters already: remove one of them")
        _optimizer_class(others, OTHERS)
    elif cls is Muon:
        raise ConfigError(
            f"optimizer: Muon is for matrices: set {OTHERS} for the rest, such as {OTHERS}: {{type: AdamW, lr: 3e-4}}"
        )
    for number, group in enumerate(component.groups or ()):
        path = f"optimizer.groups[{number}]"
        check_arguments(cls, group.arguments, path, [])
        try_on(cls, {**component.arguments, **group.arguments}, path, [Parameter(torch.zeros(1, 1))])


def _optimizer_class(component: Component, path: str) -> Any:
    """Returns the class of an optimizer, tried with its arguments."""
    cls = _imported(component, path, _by_path(path))
    if inspect.isclass(cls) and not issubclass(cls, Optimizer):
        raise ConfigError(f"{path}: {component.type} is not an optimizer of torch's kind (torch.optim.Optimizer)")
    check_arguments(cls, component.arguments, path, [])
    try_on(cls, component.arguments, path, [Parameter(torch.zeros(1, 1))])
    return cls


def _check_scheduler(component: Component) -> None:
    cls = _imported(component, "scheduler", _by_path("scheduler"))
    check_arguments(cls, component.arguments, "scheduler", object())
    # How many steps there are (auto) is known when the data is: here any number does.
    arguments = {name: 100 if value == AUTO else value for name, value in component.arguments.items()}
    # A cyclic schedule of the momentum wants an optimizer that has one.
    try_on(cls, arguments, "scheduler", SGD([Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))


def _check_callback(component: Component, path: str) -> None:
    cls = _imported(component, path, lambda each: callback_class(each, path))
    check_arguments(cls, component.arguments, path)


def _check_logger(component: Component, path: str) -> None:
    cls = _imported(component, path, _by_path(path))
    check_methods(cls, path, component.type)
    check_arguments(cls, component.arguments, path)


def _by_path(name: str) -> Callable[[Component], Any]:
    return lambda component: import_object(component.type, name)


def _imported(component: Component, name: str, find: Callable[[Component], Any]) -> Any:
    """Finds what a config names; an error in the user's file is reported with its line."""
    try:
        return find(component)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise CannotImport(
            f"{name}: {component.type} cannot be imported: {type(error).__name__}: {error}{at}"
        ) from None
