"""Device families, chosen by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lockstep.config.strategy import processes_of
from lockstep.errors import ConfigError
from lockstep.runtime import pjrt
from lockstep.runtime.gpus import check_devices, gpu_count

if TYPE_CHECKING:
    from lockstep.config.schema import RunSettings
    from lockstep.runtime.base import Runtime

# torch is imported inside the functions below, so that a run on explicit settings is planned without it.


def resolve(settings: RunSettings) -> tuple[str, int]:
    """Returns the device family and the number of processes on this host."""
    runtime, processes = settings.runtime, settings.processes
    if runtime == "auto":
        runtime = "xla" if pjrt.DEVICE in os.environ else "cuda" if gpu_count() else "cpu"
    if runtime == "xla":
        count = pjrt.processes(settings, os.environ) if processes == "auto" else int(processes)
        pjrt.check(settings, os.environ, count)
        return runtime, count
    _refuse_xla_settings(settings, runtime)
    if runtime == "cuda":
        present = gpu_count()
        wanted = (_mesh_asks(settings) or max(present, 1)) if processes == "auto" else int(processes)
        check_devices(min(wanted, 1) if settings.launch.share_devices else wanted, present)
        return runtime, wanted
    return runtime, (_mesh_asks(settings) or 1) if processes == "auto" else int(processes)


def _mesh_asks(settings: RunSettings) -> int | None:
    """Returns the processes that a mesh on this host needs, if it says so."""
    alone = settings.strategy.has_mesh and settings.launch.type == "local"
    return processes_of(settings.strategy) if alone else None


def _refuse_xla_settings(settings: RunSettings, runtime: str) -> None:
    if settings.strategy.type == "threads":
        raise ConfigError(f"strategy: threads needs runtime: xla, but the runtime is {runtime}")
    if settings.strategy.type == "spmd":
        raise ConfigError(
            f"strategy: spmd needs runtime: xla, but the runtime is {runtime}. Use strategy: fsdp or hsdp, or tensor "
            "with the rules of strategy.shard"
        )
    if settings.devices not in ("auto", 1):
        raise ConfigError(
            f"devices: {settings.devices} is for XLA devices of one process, but the runtime is {runtime}: "
            f"set processes: {settings.devices} instead"
        )


def unused_devices(runtime: str, processes: int) -> str | None:
    """Returns a note if the run leaves GPUs of this host idle."""
    if runtime != "cuda" or processes >= (present := gpu_count()):
        return None
    return f"{processes} of {present} visible GPUs will be used; processes: auto uses them all"


def create(runtime: str, local_rank: int, local_world_size: int, settings: RunSettings) -> Runtime:
    """Creates the runtime of this process on the device of its local rank."""
    if runtime == "xla":
        from lockstep.runtime.xla import XlaRuntime

        return XlaRuntime(local_rank, local_world_size, settings)
    from lockstep.runtime.cpu import CpuRuntime
    from lockstep.runtime.cuda import CudaRuntime

    return {"cpu": CpuRuntime, "cuda": CudaRuntime}[runtime](local_rank, settings.launch.share_devices)


def set_variables(wanted: Mapping[str, str | None]) -> None:
    """Sets environment variables, and removes those that are None."""
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def with_variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    set_variables(wanted)
    try:
        yield
    finally:
        set_variables(before)
