"""What the workers need to know of a `TorchConfig`: below everything that reads it, and below that class itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lockstep.config.load import validate
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError

XLA_BACKENDS = ("xla", "xla_tpu")
BACKENDS = ("auto", "gloo", "nccl", *XLA_BACKENDS)
# What a run on Ray is told by Ray or by the fields of the config, and must not be told twice.
_NOT_SETTINGS = ("processes", "runtime", "launch")


class WorkerSettings(Protocol):
    """The fields of `TorchConfig`, which says what each of them means."""

    backend: str
    timeout_s: int
    join_timeout_s: float
    xla_spmd_config: Mapping[str, Any] | None
    xla_memory_fraction: float | None
    xla_memory_preallocate: bool | None
    share_devices: bool
    settings: RunSettings | Mapping[str, Any]
    folder: str | None
    task: str | None
    report_every_s: float


def checked_settings(settings: RunSettings | Mapping[str, Any]) -> RunSettings:
    if isinstance(settings, RunSettings):
        return settings
    twice = [name for name in _NOT_SETTINGS if name in settings]
    if twice:
        raise ConfigError(
            f"TorchConfig: settings[{twice[0]!r}]: Ray's ScalingConfig says how many workers there are and what they "
            "get, and backend, timeout_s, join_timeout_s and share_devices of TorchConfig the rest; leave it out"
        )
    return validate(RunSettings, dict(settings), {}, "lockstep.ray.TorchConfig(settings=...)")
