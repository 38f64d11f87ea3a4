"""The source that a task is made of: digests of the files that were loaded along with it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """The files of a task: digests by their paths below a folder."""

    root: Path
    digests: dict[str, str]


def source_files(thing: Any) -> Source:
    """The file that a class or function is defined in, and its loaded neighbours.

    Neighbours are modules of the same package, or of the same folder where it is a file on its own. Files that are
    installed, and are not the task itself, are left to the comparison of versions.
    """
    while isinstance(thing, functools.partial):  # of the function inside: the partial itself is functools' own
        thing = thing.func
    module = sys.modules.get(getattr(thing, "__module__", ""))
    file = getattr(module, "__file__", None) or _file_of(thing)
    if file is None:
        return Source(Path(), {})
    home = Path(file).resolve()
    root = root_of(module, home)
    # Thousands of modules are loaded: most are told apart by how their path begins, without asking the system.
    beginnings = tuple({f"{root}{os.sep}", f"{root_of(module, Path(file))}{os.sep}"})
    found = {home}
    for loaded in list(sys.modules.values()):
        other = getattr(loaded, "__file__", None)
        if isinstance(other, str) and other.startswith(beginnings) and other.endswith(".py"):
            path = Path(other).resolve()
            if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
                found.add(path)
    return Source(root, {str(path.relative_to(root)): _digest(path) for path in sorted(found) if path.is_file()})


def root_of(module: Any, home: Path) -> Path:
    """The folder of the outermost package that a module belongs to, or just the folder that its file is in."""
    depth = getattr(module, "__name__", "").count(".")
    if not depth:
        return home.parent
    root = home.parent if home.name == "__init__.py" else home
    for _ in range(depth):
        root = root.parent
    return root


def _file_of(thing: Any) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except (TypeError, OSError):  # of a class that was typed into an interpreter
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
