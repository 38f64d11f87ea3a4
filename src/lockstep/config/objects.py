"""Imports and makes what a config names: `package.module:Name`, `file.py:Name`, with arguments from the YAML."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from lockstep.config.nearest import did_you_mean, nearest
from lockstep.errors import ConfigError
from lockstep.import_path import add_task_folder

# What is being imported for a config right now: a file that starts a run when it is imported would start it once more
# in every rank, and is refused.
loading: list[str] = []


def construct(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> Any:
    """Call a constructor with arguments from the config; arguments that do not fit are named by their YAML path."""
    check_arguments(cls, arguments, path, *positional)
    try:
        return cls(*positional, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        if not _is_of_torch(cls):
            raise  # the user's own code, whose traceback says more
        given = ", ".join(f"{path}.{name}: {value!r}" for name, value in arguments.items()) or "no arguments"
        raise ConfigError(f"{path}: {cls.__name__} cannot be made with {given}: {error}") from None


def _is_of_torch(cls: Any) -> bool:
    return str(getattr(cls, "__module__", "")).startswith("torch.")


def try_on(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> None:
    """Make one of torch's optimizers or schedulers for nothing but to see that its arguments will do."""
    if _is_of_torch(cls):
        construct(cls, arguments, path, *positional)


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


class NotInstalled(ConfigError):
    """A config names a package that is not on this machine."""


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
    if module.split(".")[0] not in sys.modules:
        with contextlib.suppress(OSError):  # a folder that was deleted has nothing to offer
            add_task_folder(str(Path.cwd()))  # whoever is in a project expects its packages to be found
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            kind = ConfigError if "." in error.name else NotInstalled
            raise kind(f"{name}: there is no module {error.name!r}, got {path!r}") from None
        raise


def _load_file(file: Path) -> Any:
    if _is_main(file):
        return sys.modules["__main__"]  # not a second time, under another name
    # Registered under its stem, so that what the task's classes pickle (for data workers) can be found again.
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    _refuse_name_of_another(file, loaded)
    add_task_folder(str(file.parent))  # a task file may import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"task: {file} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(file.stem, None)  # as Python's own import does: the next one finds the same error
        if isinstance(error, FileNotFoundError) and error.filename == str(file):
            raise ConfigError(f"task: there is no file {file}") from None
        raise
    return module


def _refuse_name_of_another(file: Path, loaded: Any) -> None:
    """A task in `random.py` would take the place of Python's own module for everybody who asks for it from here on."""
    place = getattr(loaded, "__file__", None) or ""
    if file.stem in sys.stdlib_module_names or "site-packages" in place:
        raise ConfigError(f"task: {file} has the name of another module and would hide it: rename the file")


def _is_main(file: Path) -> bool:
    """Whether this process is running that file as a script."""
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    return running is not None and Path(running).resolve() == file
