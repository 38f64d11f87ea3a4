"""What to train: the user's code."""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.config.schema import Component
from lockstep.errors import ConfigError


class Task(abc.ABC):
    """A model, its data and its loss. Every method runs on every rank; arguments of __init__ come from the config."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The module to train. It is made after seeding, so all ranks make the same one."""

    @abc.abstractmethod
    def train_data(self) -> Dataset[Any]:
        """A map-style dataset."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A scalar: the mean over the batch."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """One value per example, shape [B], so that a mean over a whole set counts every example exactly once."""
        return {}

    def val_data(self) -> Dataset[Any] | None:
        return None

    def test_data(self) -> Dataset[Any] | None:
        return None

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Used where the config names no optimizer."""
        return None

    def scheduler(self, optimizer: Optimizer) -> Any:
        """Used where the config names no scheduler; stepped every epoch."""
        return None

    def shard_rules(self) -> dict[str, Any]:
        """For SPMD: parameter-name pattern -> mesh axis (or None) for every dimension; `strategy.shard` comes first."""
        return {}

    def should_stop(self, metrics: dict[str, float]) -> str | None:
        """A reason to end training on all ranks, for instance that a trial is pruned; asked on rank 0, after every
        validation."""
        return None

    # A task may define collate(examples) to build batches in its own way.


def create_task(component: Component) -> Task:
    """Import the task's class and make one, saying precisely what is wrong with it where something is."""
    cls = import_object(component.type, "task")
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise ConfigError(f"task: {component.type} is not a class derived from lockstep.Task")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        lacking = ", ".join(f"{name}{inspect.signature(getattr(cls, name))}" for name in missing)
        raise ConfigError(f"task: {cls.__name__} in {component.type} does not define {lacking}")
    task: Task = construct(cls, component.arguments, "task")
    return task


def construct(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> Any:
    """Call a constructor with arguments from the config; arguments that do not fit are named by their YAML path."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*positional, **arguments)
        except TypeError as error:
            valid = list(signature.parameters)[len(positional) :]
            raise ConfigError(
                f"{path}: {cls.__name__} cannot be made from {arguments!r}: {error}. Its arguments are "
                f"{', '.join(valid) or 'none'}"
            ) from None
    return cls(*positional, **arguments)


def import_object(path: str, name: str) -> Any:
    """What `package.module:Name`, `package.module.Name` or `file.py:Name` stands for."""
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    module = (
        _load_file(Path(module_name).resolve()) if module_name.endswith(".py") else _import(module_name, path, name)
    )
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{name}: {module_name} has no {attribute!r}, got {path!r}") from None


def _import(module: str, path: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"{name}: there is no module {error.name!r}, got {path!r}") from None
        raise


def _load_file(file: Path) -> Any:
    # Registered under its stem, so that what the task's classes pickle (for data workers) can be found again.
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    with contextlib.suppress(ValueError):
        sys.path.remove(str(file.parent))
    sys.path.insert(0, str(file.parent))  # a task file may import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"task: {file} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        if error.filename == str(file):
            raise ConfigError(f"task: there is no file {file}") from None
        raise
    return module
