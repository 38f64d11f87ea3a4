"""Lockstep trains PyTorch models with every device in step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.errors import ConfigError, LockstepError, WorkerFailed
    from lockstep.launcher.function import launch
    from lockstep.train.run import Run
    from lockstep.train.task import Task

__version__ = "0.1.0"

__all__ = ["ConfigError", "LockstepError", "Run", "Task", "WorkerFailed", "__version__", "launch"]

# Loaded when first used: importing the package must not import torch.
_HOMES = {
    "ConfigError": "lockstep.errors",
    "LockstepError": "lockstep.errors",
    "Run": "lockstep.train.run",
    "Task": "lockstep.train.task",
    "WorkerFailed": "lockstep.errors",
    "launch": "lockstep.launcher.function",
}


def __getattr__(name: str) -> Any:
    if name == "ray":
        return importlib.import_module("lockstep.ray")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
