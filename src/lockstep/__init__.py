"""Lockstep trains PyTorch models with every device in step."""

from lockstep import import_path

import_path.leave_out_current_folder()  # before anything that could be found there is imported

import importlib  # noqa: E402
import types  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from lockstep.data.tar import TarShards
    from lockstep.errors import ConfigError, LockstepError, WorkerFailed
    from lockstep.launcher.function import launch
    from lockstep.start.function import train
    from lockstep.train.hooks import Hook
    from lockstep.train.mean import Mean
    from lockstep.train.run import Run
    from lockstep.train.schedules import Schedule
    from lockstep.train.task import Task

    __version__: str

__all__ = [
    "ConfigError",
    "Hook",
    "LockstepError",
    "Mean",
    "Run",
    "Schedule",
    "TarShards",
    "Task",
    "WorkerFailed",
    "__version__",
    "launch",
    "train",
]

# Loaded when first used: importing the package must not import torch.
_HOMES = {
    "ConfigError": "lockstep.errors",
    "Hook": "lockstep.train.hooks",
    "LockstepError": "lockstep.errors",
    "Mean": "lockstep.train.mean",
    "Run": "lockstep.train.run",
    "Schedule": "lockstep.train.schedules",
    "TarShards": "lockstep.data.tar",
    "Task": "lockstep.train.task",
    "WorkerFailed": "lockstep.errors",
    "launch": "lockstep.launcher.function",
}
_PACKAGES = ("nn", "ray")


class _Train(types.ModuleType):
    """The package `lockstep.train`, which is the function of the same name as well.

    Importing any module of a package binds the package's name here, over whatever else has that name: a function
    `train` would be there until something imports lockstep.train.run, and be gone then. So the package is what
    is called. docs/decisions/014-a-package-that-is-called.md
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from lockstep.start.function import train

        return train(*args, **kwargs)


importlib.import_module("lockstep.train").__class__ = _Train  # which imports no more than a docstring


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"lockstep.{name}")
    if name == "__version__":
        return importlib.import_module("lockstep.version").installed()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *_PACKAGES, *special})
