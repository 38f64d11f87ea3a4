"""What an import can tell of what a config names (the task, the optimizer, loggers ...): nothing is made of them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lockstep.config.objects import NotInstalled, check_arguments, import_object, try_on
from lockstep.config.optimizing import Optimizer as OptimizerSettings
from lockstep.config.schema import Component, RunConfig, Schedule
from lockstep.errors import ConfigError
from lockstep.record.logger import check_methods
from lockstep.train.own_hooks import hook_class
from lockstep.train.schedules import AUTO
from lockstep.train.task import task_class


class CannotImport(ConfigError):
    """What a config names is there, and fails while it is imported."""


# What may well be there on another machine.
ELSEWHERE = (CannotImport, NotInstalled)


def check_parts(config: RunConfig, pass_over: tuple[type[ConfigError], ...] = ()) -> list[str]:
    """Raises all that is wrong with them at once. Returns the messages of the errors that are to be passed over."""
    checks: list[tuple[Callable[[Any], None], Component | None]] = [
        (_check_task, config.task),
        (_check_optimizer, config.optimizer),
        (_check_scheduler, None if isinstance(config.scheduler, Schedule) else config.scheduler),
    ]
    checks += [(_check_hook(index), each) for index, each in enumerate(config.hooks)]
    checks += [
        (_check_logger(name), Component.model_validate(own.model_dump())) for name, own in config.log.own.items()
    ]
    problems: list[str] = []
    passed_over: list[str] = []
    for check, component in checks:
        try:
            if component is not None:
                check(component)
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


def _check_hook(index: int) -> Callable[[Component], None]:
    def check(component: Component) -> None:
        path = f"hooks[{index}]"
        cls = _imported(component, path, lambda each: hook_class(each, path))
        check_arguments(cls, component.arguments, path)

    return check


def _check_logger(name: str) -> Callable[[Component], None]:
    def check(component: Component) -> None:
        cls = _imported(component, f"log.{name}", _by_path(f"log.{name}"))
        check_methods(cls, f"log.{name}", component.type)
        check_arguments(cls, component.arguments, f"log.{name}")

    return check


def _by_path(name: str) -> Callable[[Component], Any]:
    return lambda component: import_object(component.type, name)


def _imported(component: Component, name: str, find: Callable[[Component], Any]) -> Any:
    """An error in the user's own file is told with its place there."""
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
