"""Keeps the current folder off the import path of Lockstep's processes.

A `random.py` or `yaml.py` there would be imported in place of the module that was meant. This module is imported before
any other of the package, so it imports only what Python has loaded anyway.
"""

import os
import sys

_SAFE = "PYTHONSAFEPATH"
_OURS = "lockstep"  # the value that Lockstep sets; Python asks only whether there is one

# The folders of tasks that were added to the path, the newest first.
_task_folders: list[str] = []


def leave_out_current_folder() -> None:
    """Removes the folder that Python puts first on the path for `python -m lockstep`.

    It is moved to the end where it holds the package itself, which could not be found otherwise.
    """
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or not _runs_us() or not sys.path:
        return
    folder = sys.path.pop(0)
    if os.path.join(folder, __package__) == os.path.dirname(__file__):  # noqa: PTH118, PTH120  pathlib is not loaded yet
        sys.path.append(folder)


class safe_interpreters:
    """Makes interpreters that are started in the context ignore the current folder, as with `python -P`."""

    def __enter__(self) -> None:
        self._before = os.environ.get(_SAFE)
        if not self._before:
            os.environ[_SAFE] = _OURS

    def __exit__(self, *exception: object) -> None:
        if not self._before:
            os.environ.pop(_SAFE, None)
        if self._before is not None:
            os.environ[_SAFE] = self._before


def forget_safe_interpreters() -> None:
    """Undoes safe_interpreters in an interpreter that was started so: processes that it starts are the user's."""
    if os.environ.get(_SAFE) == _OURS:
        del os.environ[_SAFE]


def add_task_folder(folder: str) -> None:
    """Adds the folder of a task to the path, after installed packages and before the folders of earlier tasks."""
    if folder in _task_folders:
        _task_folders.remove(folder)
        if folder in sys.path:
            sys.path.remove(folder)
    if folder in sys.path:
        return  # the user put it there
    earlier = next((index for index, each in enumerate(sys.path) if each in _task_folders), len(sys.path))
    sys.path.insert(earlier, folder)
    _task_folders.insert(0, folder)


def _runs_us() -> bool:
    """Whether Python runs a module of this package: its name comes before the arguments in sys.orig_argv."""
    index = len(sys.orig_argv) - len(sys.argv)
    name = sys.orig_argv[index].removeprefix("-m") if 0 < index < len(sys.orig_argv) else ""
    return name.split(".")[0] == __package__
