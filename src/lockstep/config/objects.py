"""The user's code: located and checked without importing it, imported, constructed, and copied to other machines."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import fnmatch
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from lockstep.config.plain import did_you_mean, nearest, read_bytes
from lockstep.config.schema import Component, RunConfig
from lockstep.errors import ConfigError
from lockstep.import_path import add_task_folder
from lockstep.shown import brief

# The import paths being loaded: a file that starts a run on import would start another in every rank, and is refused.
loading: list[str] = []


def construct(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> Any:
    """Calls a constructor with arguments from the config; errors name the YAML path."""
    check_arguments(cls, arguments, path, *positional)
    try:
        return cls(*positional, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        if not _is_of_torch(cls):
            raise  # in user code, the traceback says more
        given = ", ".join(f"{path}.{name}: {value!r}" for name, value in arguments.items()) or "no arguments"
        raise ConfigError(f"{path}: {cls.__name__} cannot be made with {given}: {error}") from None


def _is_of_torch(cls: Any) -> bool:
    return str(getattr(cls, "__module__", "")).startswith("torch.")


def try_on(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> None:
    """Constructs an optimizer or scheduler of torch only to check its arguments."""
    if _is_of_torch(cls):
        construct(cls, arguments, path, *positional)


def check_arguments(cls: Any, arguments: dict[str, Any], path: str, *positional: Any) -> None:
    """Checks arguments against the signature of a constructor."""
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
            lines = [f"{path}.{name}: {cls.__name__} has no such argument, {did_you_mean(name, named)} "
                     f"(value {arguments[name]!r})" for name in unknown]  # fmt: skip
            raise ConfigError("\n".join(lines))
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {cls.__name__} cannot be made from {arguments!r}: {error}. Its arguments are {valid}"
        ) from None


def check_types(made: Any, cls: type, path: str) -> None:
    """Checks the fields of a dataclass against their annotations; a Path may stand for its text."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        value = getattr(made, field.name)
        try:
            TypeAdapter(hints[field.name]).validate_python(
                str(value) if isinstance(value, Path) else value, strict=True
            )
        except ValidationError as problems:
            told = " or ".join(each["msg"].replace("Input", "input", 1) for each in problems.errors())
            raise ConfigError(f"{path}.{field.name}: {told}, got {brief(repr(value), 60)}") from None


class NotInstalled(ConfigError):
    """A config names a package that is not installed."""


def import_object(path: str, name: str) -> Any:
    """Returns what `package.module:Name`, `package.module.Name` or `file.py:Name` stands for."""
    module_name, attribute = _split(path)
    loading.append(path)
    try:
        if module_name.endswith(".py"):
            module = _load_file(Path(module_name).resolve())
        else:
            module = _import(module_name, path, name)
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
        with contextlib.suppress(OSError):  # the current folder may have been deleted
            add_task_folder(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            kind = ConfigError if "." in error.name else NotInstalled
            raise kind(f"{name}: there is no module {error.name!r}, got {path!r}") from None
        raise


def _load_file(file: Path) -> Any:
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    if running is not None and Path(running).resolve() == file:
        return sys.modules["__main__"]  # not a second time, under another name
    # Registered under its stem, so that data workers can unpickle its classes.
    loaded = sys.modules.get(file.stem)
    place = getattr(loaded, "__file__", None) or ""
    if place == str(file):
        return loaded
    if file.stem in sys.stdlib_module_names or "site-packages" in place:  # `random.py` would replace Python's
        raise ConfigError(f"task: {file} has the name of another module and would hide it: rename the file")
    add_task_folder(str(file.parent))  # a task file may import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"task: {file} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(file.stem, None)  # as Python's import does
        if isinstance(error, FileNotFoundError) and error.filename == str(file):
            raise ConfigError(f"task: there is no file {file}") from None
        raise
    return module


_LONGEST_SOURCE = 10_000_000

KeyPath = tuple[str | int, ...]


def with_task_located(config: RunConfig, folder: Path, places: Mapping[KeyPath, str], source: str) -> RunConfig:
    """Makes the files of the task and of callbacks absolute, and checks them without importing anything."""
    task = _located(config.task, ("task",), folder, places, source)
    task = task.model_copy(update={name: _with_files(value, folder) for name, value in task.arguments.items()})
    callbacks = [
        _located(each, ("callbacks", index), folder, places, source) for index, each in enumerate(config.callbacks)
    ]
    return config.model_copy(update={"task": task, "callbacks": tuple(callbacks)})


def _located(component: Component, at: KeyPath, folder: Path, places: Mapping[KeyPath, str], source: str) -> Component:
    module, name = _split(component.type)
    if not module.endswith(".py") and _exists(folder / f"{module}.py"):
        module = f"{module}.py"  # next to the config, where Python does not look
    try:
        if not module.endswith(".py"):
            _require_module(module, folder, component.type)
            return component
        file = _checked_file(folder, module, component.type)
        _require_class(file, name)
    except ConfigError as error:
        place = places.get((*at, "type"), places.get(at, source))
        what = str(at[0]) if len(at) == 1 else f"{at[0]}[{at[1]}]"
        raise ConfigError(f"{place}: {what}: {error}") from None
    return component.model_copy(update={"type": f"{file}:{name}"})


def _with_files(value: Any, folder: Path) -> Any:
    """Returns an argument of the task with `file.py:Name` in it made absolute, where there is such a file."""
    if isinstance(value, Mapping):
        return {name: _with_files(each, folder) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_files(each, folder) for each in value]
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{(folder / file).resolve()}:{name}" if file.endswith(".py") and _exists(folder / file) else value


def source_of(task: Component) -> str:
    """Returns the import path of the user's code: that of the task or, where that is an adapter, of what it wraps."""
    if _split(task.type)[0].endswith(".py"):
        return task.type
    given = (each.get("type") if isinstance(each, Mapping) else each for each in task.arguments.values())
    named = (each for each in given if isinstance(each, str))
    return next((each for each in named if each.rpartition(":")[0].endswith(".py")), task.type)


def require_travelling(task: Component) -> None:
    """Refuses a file that an adapter wraps where it would have to travel to other hosts: the task's own file does."""
    if (wrapped := source_of(task)) != task.type:
        raise ConfigError(
            f"task: {wrapped} is an argument of {task.type}, and only the folder of the task itself travels to other "
            "hosts. Write a file beside it with a class that derives from the adapter, and name that as the task"
        )


def _require_module(module: str, folder: Path, given: str) -> None:
    top = module.split(".")[0]
    if top == "__main__":  # a task that was typed into a session
        return
    if any(_exists(each / top, folders=True) or _exists(each / f"{top}.py") for each in (folder, Path())):
        return
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(top) is not None:
            return
    raise ConfigError(
        f"there is no module {module!r} (looked in {folder}, in the current folder and on Python's path), got {given!r}"
    )


def _checked_file(folder: Path, module: str, given: str) -> Path:
    try:
        file = (folder / module).resolve()
        there = file.is_file()
    except (OSError, ValueError) as error:  # an impossible name, a loop of links
        raise ConfigError(f"{brief(module)!r} cannot be looked for: {error}") from None
    if not there:
        raise ConfigError(f"there is no file {file}, got {given!r}")
    if file.stem in sys.stdlib_module_names:
        raise ConfigError(f"{file} has the name of a module of Python's own and would hide it: rename the file")
    return file


def _require_class(file: Path, name: str) -> None:
    """Refuses a file that is not Python, or that defines classes and does not contain the name of this one."""
    try:
        source = read_bytes(file, _LONGEST_SOURCE)
        tree, text = ast.parse(source, filename=str(file)), importlib.util.decode_source(source)
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; thousands of parentheses
        raise ConfigError(f"{file}: not valid Python: {error or type(error).__name__}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    classes = [item.name for item in tree.body if isinstance(item, ast.ClassDef)]
    if classes and not re.search(rf"\b{name}\b|import \*", text):
        near = difflib.get_close_matches(name, classes, n=1, cutoff=0.0)
        raise ConfigError(f"{file} defines no {name!r}, did you mean {near[0]}?")


def _exists(path: Path, folders: bool = False) -> bool:
    try:
        return path.is_dir() if folders else path.is_file()
    except (OSError, ValueError):  # an impossible name
        return False


def _split(path: str) -> tuple[str, str]:
    """Splits `package.module:Name`, `package.module.Name` or `file.py:Name` at the name."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return module, name


# Files that are not copied to other machines, as .gitignore patterns: large, local or secret.
EXCLUDED = (
    "runs/",
    ".git/",
    ".venv*/",
    "venv/",
    "env/",
    "node_modules/",
    "__pycache__/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    "*.safetensors",
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
)


_FOLDERS_EXCLUDED = re.compile("|".join(fnmatch.translate(each.removesuffix("/")) for each in EXCLUDED))
_FILES_EXCLUDED = re.compile("|".join(fnmatch.translate(each) for each in EXCLUDED if not each.endswith("/")))


def travelling(folder: str | os.PathLike[str], below: str = "") -> Iterator[str]:
    """Yields the relative paths of the files that are copied to other machines, sorted by name."""
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir():
            if not entry.is_symlink() and not _FOLDERS_EXCLUDED.match(entry.name):
                yield from travelling(entry.path, f"{below}{entry.name}/")
        elif entry.is_file() and not _FILES_EXCLUDED.match(entry.name):
            yield below + entry.name
