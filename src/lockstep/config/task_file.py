"""Where a task is, and what its source says of it: looked for without importing anything."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.nearest import did_you_mean
from lockstep.config.schema import Component, RunConfig
from lockstep.config.text_file import read_bytes
from lockstep.errors import ConfigError
from lockstep.shown import brief

_LONGEST_SOURCE = 10_000_000

KeyPath = tuple[str | int, ...]


def with_task_located(config: RunConfig, folder: Path, places: Mapping[KeyPath, str], source: str) -> RunConfig:
    """Make a task's file absolute, and those of callbacks, and refuse one that cannot be there, without importing
    it."""
    task = _located(config.task, ("task",), folder, places, source)
    callbacks = [
        _located(each, ("callbacks", index), folder, places, source) for index, each in enumerate(config.callbacks)
    ]
    return config.model_copy(update={"task": task, "callbacks": tuple(callbacks)})


def _located(component: Component, at: KeyPath, folder: Path, places: Mapping[KeyPath, str], source: str) -> Component:
    place = places.get((*at, "type"), places.get(at, source))
    what = at[0] if len(at) == 1 else f"{at[0]}[{at[1]}]"
    module, _, name = component.type.rpartition(":") if ":" in component.type else component.type.rpartition(".")
    if not module.endswith(".py") and _is_file(folder / f"{module}.py"):
        module = f"{module}.py"  # next to the config, which is not where Python looks
    if not module.endswith(".py"):
        if not _module_exists(module, folder):
            raise ConfigError(
                f"{place}: {what}: there is no module {module!r} (looked in {folder}, in the current folder and "
                f"on Python's path), got {component.type!r}"
            )
        return component
    try:
        file = (folder / module).resolve()
        there = file.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have, a loop of links
        raise ConfigError(f"{place}: {what}: {brief(module)!r} cannot be looked for: {error}") from None
    if not there:
        raise ConfigError(f"{place}: {what}: there is no file {file}, got {component.type!r}")
    if file.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"{place}: {what}: {file} has the name of a module of Python's own and would hide it: rename the file"
        )
    try:
        tree = ast.parse(read_bytes(file, _LONGEST_SOURCE), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(f"{place}: {what}: {file}:{error.lineno}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; thousands of parentheses
        raise ConfigError(f"{place}: {what}: {file}: not valid Python: {error or type(error).__name__}") from None
    except OSError as error:
        raise ConfigError(f"{place}: {what}: {file}: cannot be read: {error.strerror}") from None
    # A file may make its class by assignment or import; only a file that defines classes and not this one is refused.
    classes = [item.name for item in tree.body if isinstance(item, ast.ClassDef)]
    if classes and not {name, "*"} & _top_level_names(tree.body):
        nearest = difflib.get_close_matches(name, classes, n=1, cutoff=0.0)
        raise ConfigError(f"{place}: {what}: {file} defines no {name!r}, did you mean {nearest[0]}?")
    problems = _arguments_that_do_not_fit(tree, name, component.arguments, file)
    if problems:
        told = [f"{places.get((*at, key), place)}: {what}.{key}: {problem}" for key, problem in problems]
        raise ConfigError("\n".join(told))
    return component.model_copy(update={"type": f"{file}:{name}"})


def _arguments_that_do_not_fit(
    tree: ast.Module, name: str, arguments: Mapping[str, Any], file: Path
) -> list[tuple[str, str]]:
    """Arguments that a plainly written constructor does not have, or lacks, each with what to say of it; any other
    constructor is left to whoever imports it."""
    cls = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name), None)
    made = _methods(cls, "__init__") if cls is not None and not (cls.decorator_list or cls.keywords) else []
    if cls is None or len(made) != 1 or made[0].decorator_list or _methods(cls, "__new__"):
        return []
    takes = made[0].args
    if takes.kwarg is not None or takes.posonlyargs or not takes.args:
        return []
    named = [each.arg for each in (*takes.args[1:], *takes.kwonlyargs)]
    problems = [
        (key, f"{name} has no such argument ({file}:{made[0].lineno}), {did_you_mean(key, named)} (value {value!r})")
        for key, value in arguments.items()
        if key not in named
    ]
    required = takes.args[1 : len(takes.args) - len(takes.defaults)]
    required += [each for each, usual in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if usual is None]
    problems += [
        (each.arg, f"missing: {name} needs it ({file}:{made[0].lineno})")
        for each in required
        if each.arg not in arguments
    ]
    return problems


def _methods(cls: ast.ClassDef, name: str) -> list[ast.FunctionDef]:
    """Also under `if`, where a class may choose between several."""
    return [each for each in ast.walk(cls) if isinstance(each, ast.FunctionDef) and each.name == name]


def _top_level_names(body: Iterable[ast.AST]) -> set[str]:
    """Names that a file may define, also under `if` and `try`; a star where it imports everything from another."""
    names: set[str] = set()
    for item in body:
        if isinstance(item, (ast.ClassDef, ast.FunctionDef)):
            names.add(item.name)
        elif isinstance(item, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            names |= _top_level_names(ast.iter_child_nodes(item))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in item.names)
        elif isinstance(item, ast.Assign):
            names.update(target.id for target in item.targets if isinstance(target, ast.Name))
    return names


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _module_exists(module: str, folder: Path) -> bool:
    top = module.split(".")[0]
    if top == "__main__":  # of a session that a task was typed into
        return True
    if any(_is_folder(each / top) or _is_file(each / f"{top}.py") for each in (folder, Path())):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
