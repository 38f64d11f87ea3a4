"""Tests here run real torch_xla on PJRT CPU; every run is a process of its own, as PJRT is set up once per process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

needs_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="torch_xla is not installed (it has no build for this Python, torch or processor)",
)


def on_xla(strategy: Any = "auto", devices: Any = "auto", processes: int = 1, **xla: Any) -> dict[str, Any]:
    """The part of a config that puts a run on PJRT CPU."""
    return {
        "runtime": "xla", "xla": {"device": "CPU", **xla}, "strategy": strategy, "devices": devices,
        "processes": processes,
    }  # fmt: skip
