"""Lockstep on a Ray cluster: a TorchConfig for Ray's TorchTrainer, and the Run inside its training function.

Only this package imports ray. What it offers is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.ray.backend import TorchConfig
    from lockstep.ray.data import DataConfig, batches, evaluate
    from lockstep.ray.session import fit, run

__all__ = ["DataConfig", "TorchConfig", "batches", "evaluate", "fit", "run"]

_HOMES = {
    "DataConfig": "lockstep.ray.data",
    "TorchConfig": "lockstep.ray.backend",
    "batches": "lockstep.ray.data",
    "evaluate": "lockstep.ray.data",
    "fit": "lockstep.ray.session",
    "run": "lockstep.ray.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lockstep.ray.installed import require_ray

    require_ray()
    return getattr(importlib.import_module(_HOMES[name]), name)
