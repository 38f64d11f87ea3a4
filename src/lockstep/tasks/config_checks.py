"""Checks a config before any rank is started: the classes it names, and their arguments.

What needs the model or the data is left to the ranks, which check it before the first step.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lockstep.config.objects import NotInstalled, check_arguments, import_object, try_on
from lockstep.config.schema import After, Component, RunConfig, Schedule
from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.errors import ConfigError
from lockstep.record.logger import check_methods
from lockstep.tasks.callbacks import callback_class
from lockstep.tasks.create import create_task, task_class
from lockstep.tasks.evaluate import data_named
from lockstep.tasks.predict import require_predict
from lockstep.tasks.schedules import AUTO
from lockstep.tasks.task import Task, defines


def check_made(config: RunConfig) -> None:
    """Raises ConfigError for what a command after training asks of a task that does not have it."""
    if config.after is None:
        return
    task = _unless_it_fails(lambda: create_task(config.task))
    if task is not None:
        _check_after(task, config, config.after)


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
    cls = _imported(component, "optimizer", _by_path("optimizer"))
    if inspect.isclass(cls) and not issubclass(cls, Optimizer):
        raise ConfigError(f"optimizer: {component.type} is not an optimizer of torch's kind (torch.optim.Optimizer)")
    check_arguments(cls, component.arguments, "optimizer", [])
    try_on(cls, component.arguments, "optimizer", [Parameter(torch.zeros(1))])
    for number, group in enumerate(component.groups or ()):
        path = f"optimizer.groups[{number}]"
        check_arguments(cls, group.arguments, path, [])
        try_on(cls, {**component.arguments, **group.arguments}, path, [Parameter(torch.zeros(1))])


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
