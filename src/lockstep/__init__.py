"""Lockstep trains PyTorch models with every device in step."""

from lockstep import import_path

import_path.leave_out_current_folder()  # before anything that could be found there is imported

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from lockstep.data.tar import TarShards
    from lockstep.engine.run import Run
    from lockstep.errors import ConfigError, LockstepError, WorkerFailed
    from lockstep.evaluation.means import Mean
    from lockstep.launchers.launch import launch
    from lockstep.launchers.train import train
    from lockstep.strategy.combined import CombinedOptimizer
    from lockstep.tasks.callbacks import Callback
    from lockstep.tasks.schedules import Schedule
    from lockstep.tasks.task import Task

    __version__: str

__all__ = [
    "Callback", "CombinedOptimizer", "ConfigError", "LockstepError", "Mean", "Run", "Schedule", "TarShards", "Task",
    "WorkerFailed", "__version__", "launch", "train",
]  # fmt: skip

# Loaded when first used: importing the package must not import torch.
_HOMES = {
    "ConfigError": "lockstep.errors",
    "Callback": "lockstep.tasks.callbacks",
    "CombinedOptimizer": "lockstep.strategy.combined",
    "LockstepError": "lockstep.errors",
    "Mean": "lockstep.evaluation.means",
    "Run": "lockstep.engine.run",
    "Schedule": "lockstep.tasks.schedules",
    "TarShards": "lockstep.data.tar",
    "Task": "lockstep.tasks.task",
    "WorkerFailed": "lockstep.errors",
    "launch": "lockstep.launchers.launch",
    "train": "lockstep.launchers.train",
}
_PACKAGES = ("nn", "ray", "testing")


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
