"""The settings of the workers: the fields of `lockstep.ray.TorchConfig`, checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray.train.torch

from lockstep.config.load import validate
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError
from lockstep.ray.xla import SPMD_KEYS, check_spmd_config

XLA_BACKENDS = ("xla", "xla_tpu")
BACKENDS = ("auto", "gloo", "nccl", *XLA_BACKENDS)
_SET_BY_RAY = ("processes", "runtime", "launch")


@dataclass
class WorkerSettings(ray.train.torch.TorchConfig):  # type: ignore[misc]
    backend: str = "auto"
    # mesh_shape, or data_parallel_size and model_parallel_size: the mesh of an XLA backend.
    xla_spmd_config: Mapping[str, Any] | None = None
    # How long workers may take to find each other; each way of joining an XLA group has as long.
    join_timeout_s: float = 30.0
    # The fraction of a device's memory that the XLA allocator takes, and whether it takes it at once.
    xla_memory_fraction: float | None = None
    xla_memory_preallocate: bool | None = None
    share_devices: bool = False
    # Of the run: seed, strategy, data, checkpoint, log, watch as in a config file.
    settings: RunSettings | Mapping[str, Any] = field(default_factory=dict)
    # The run's folder, on storage that all nodes see; `lockstep` inside Ray's storage where not given.
    folder: str | None = None
    # `package.module:Name` or `file.py:Name`: compared on all workers before training starts.
    task: str | None = None
    # The shortest time between two reports to Ray: every report waits for all workers.
    report_every_s: float = 5.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"TorchConfig: backend={self.backend!r} is not known; it is one of {', '.join(BACKENDS)}")
        for name in ("timeout_s", "join_timeout_s"):
            _check_number(name, getattr(self, name), above=0.0)
        _check_number("report_every_s", self.report_every_s, above=-1e-9)
        if self.xla_memory_fraction is not None:
            _check_number("xla_memory_fraction", self.xla_memory_fraction, above=0.0, most=1.0)
        for_xla = ("xla_spmd_config", "xla_memory_fraction", "xla_memory_preallocate")
        given = [name for name in for_xla if getattr(self, name) is not None]
        if given and self.backend not in (*XLA_BACKENDS, "auto"):
            raise ConfigError(
                f"TorchConfig: {given[0]} is for backend={' or '.join(map(repr, XLA_BACKENDS))}, not {self.backend!r}"
            )
        if self.xla_spmd_config is not None:
            check_spmd_config(self.xla_spmd_config)
        self.settings = self.checked_settings()

    def checked_settings(self) -> RunSettings:
        if isinstance(self.settings, RunSettings):
            return self.settings
        twice = [name for name in _SET_BY_RAY if name in self.settings]
        if twice:
            raise ConfigError(
                f"TorchConfig: settings[{twice[0]!r}]: Ray's ScalingConfig says how many workers there are and what "
                "they get, and backend, timeout_s, join_timeout_s and share_devices of TorchConfig the rest; leave it "
                "out"
            )
        return validate(RunSettings, dict(self.settings), {}, "lockstep.ray.TorchConfig(settings=...)")

    def to_dict(self) -> dict[str, Any]:
        """Returns what Ray's dashboard shows."""
        shown = {name: getattr(self, name) for name in ("backend", "init_method", "timeout_s", "join_timeout_s")}
        spmd = self.xla_spmd_config or {}
        return {**shown, "xla_spmd_config": {key: spmd[key] for key in SPMD_KEYS if key in spmd}, "folder": self.folder}


def _check_number(name: str, value: Any, above: float, most: float = math.inf) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= most
    if not fits:
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise ConfigError(f"TorchConfig: {name}={value!r} must be a number greater than {max(above, 0):g}{limit}")
