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

from lockstep.config.nearest import did_you_mean, nearest
from lockstep.config.schema import Component
from lockstep.errors import ConfigError
from lockstep.train.near_names import check_names, instead_of

# What is being imported for a config right now: a file that starts a run when it is imported would start it once more
# in every rank, and is told so.
loading: list[str] = []


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
    task: Task = construct(task_class(component), component.arguments, "task")
    return task


def task_class(component: Component) -> type[Task]:
    """The class that a config names, with everything that can be known of it without making one."""
    cls = import_object(component.type, "task")
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise ConfigError(f"task: {component.type} is not a class derived from lockstep.Task")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        lacking = ", ".join(f"{name}{inspect.signature(getattr(cls, name))}" for name in missing)
        has = [(name, near) for name in missing if (near := instead_of(name, cls, Task))]
        hint = "".join(f"; it has {near}, whose name here is {name}" for name, near in has)
        raise ConfigError(f"task: {cls.__name__} in {component.type} does not define {lacking}{hint}")
    check_names(cls, Task)
    return cls


def construct(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> Any:
    """Call a constructor with arguments from the config; arguments that do not fit are named by their YAML path."""
    check_arguments(cls, arguments, path, *positional)
    return cls(*positional, **arguments)


def check_arguments(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> None:
    """Whether a constructor takes these arguments, as far as its signature says; nothing is made."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return
    parameters = list(signature.parameters.values())[len(positional) :]
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    valid = ", ".join(named) or "none"
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        unknown = [name for name in arguments if name not in named]
        if unknown:
            raise ConfigError(
                "\n".join(
                    f"{path}.{name}: {cls.__name__} has no such argument, {did_you_mean(name, named)} "
                    f"(value {arguments[name]!r})"
                    for name in unknown
                )
            )
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {cls.__name__} cannot be made from {arguments!r}: {error}. Its arguments are {valid}"
        ) from None


def import_object(path: str, name: str) -> Any:
    """What `package.module:Name`, `package.module.Name` or `file.py:Name` stands for."""
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    loading.append(path)
    try:
        module = (
            _load_file(Path(module_name).resolve()) if module_name.endswith(".py") else _import(module_name, path, name)
        )
    finally:
        loading.pop()
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = nearest(attribute, [each for each in dir(module) if inspect.isclass(getattr(module, each, None))])
        hint = f", did you mean {near}?" if near else ""
        raise ConfigError(f"{name}: {module_name} has no {attribute!r}{hint}, got {path!r}") from None


def _import(module: str, path: str, name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # where `python -m` would look first, and whoever is in a project expects it
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"{name}: there is no module {error.name!r}, got {path!r}") from None
        raise


def _load_file(file: Path) -> Any:
    if _is_main(file):
        return sys.modules["__main__"]  # not a second time, under another name
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


def _is_main(file: Path) -> bool:
    """Whether this process is running that file as a script."""
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    return running is not None and Path(running).resolve() == file
