"""Where our own processes import from: never from the folder that a command happens to be given in.

A `random.py` or `yaml.py` there would be executed in place of the module that was meant. Imported before anything else
of the package, so it imports nothing itself that Python has not loaded anyway.
"""

import os
import sys

_SAFE = "PYTHONSAFEPATH"
_OURS = "lockstep"  # a value by which we know the variable for our own; Python asks only whether there is one

# Folders of tasks that are on the path by us, the newest first.
_task_folders: list[str] = []


def leave_out_current_folder() -> None:
    """Where this is `python -m lockstep`, take back the folder that Python has put first on the path for that.

    It comes last where the package itself lies in it, since nothing else would find it.
    """
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or not _runs_us() or not sys.path:
        return
    folder = sys.path.pop(0)
    if os.path.join(folder, __package__) == os.path.dirname(__file__):  # noqa: PTH118, PTH120  pathlib is not loaded yet
        sys.path.append(folder)


class safe_interpreters:
    """While a block runs, interpreters that it starts do not look in the current folder, as with `python -P`."""

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
    """In an interpreter that was started so: what it starts in turn is the user's, and looks where Python looks."""
    if os.environ.get(_SAFE) == _OURS:
        del os.environ[_SAFE]


def add_task_folder(folder: str) -> None:
    """Let modules be found in the folder of a task: behind the standard library and all that is installed.

    The folder of the newest task comes before those of earlier ones.
    """
    if folder in _task_folders:
        _task_folders.remove(folder)
        if folder in sys.path:
            sys.path.remove(folder)
    if folder in sys.path:
        return  # whoever put it there wanted it there
    earlier = next((index for index, each in enumerate(sys.path) if each in _task_folders), len(sys.path))
    sys.path.insert(earlier, folder)
    _task_folders.insert(0, folder)


def _runs_us() -> bool:
    """Whether the module that Python was told to run is of this package: the argument before those in sys.argv."""
    index = len(sys.orig_argv) - len(sys.argv)
    name = sys.orig_argv[index].removeprefix("-m") if 0 < index < len(sys.orig_argv) else ""
    return name.split(".")[0] == __package__
