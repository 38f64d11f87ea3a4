"""What Ray's backend has every worker do in its main thread: join before the training function runs, leave after it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.config.objects import import_object
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.rollcall.report import Report
from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError
from lockstep.ray import session, xla
from lockstep.ray.placement import WorkerInfo, device_index
from lockstep.ray.session import Session
from lockstep.ray.worker_settings import XLA_BACKENDS, WorkerSettings, checked_settings
from lockstep.runtime.base import Runtime
from lockstep.worker import Rank

# Ray brings what its own logger writes to the driver; ours has no handler until the run's folder is known.
_logger = logging.getLogger("ray.train.lockstep")


@dataclass(frozen=True)
class Joined:
    """What a worker tells the controller once it has joined."""

    reports: list[Report]  # of everybody from rank 0, else its own
    seconds: float
    devices: int = 1


def set_master_address(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def join(topology: Topology, worker: WorkerInfo, backend: str, config: WorkerSettings, xla_port: int) -> Joined:
    """Join the group as the rank that the topology says, and hold the roll call. XLA meets at a port of its own."""
    place = topology.place
    settings = _settings(config, backend, worker, topology.world_size)
    load_source = _source_loader(config, settings, place.rank, place.host)
    index = device_index(worker, place.local_rank) if settings.runtime == "cuda" else None

    def adapt(device: Runtime) -> None:
        if backend in XLA_BACKENDS and not settings.strategy.has_mesh and topology.world_size > 1:
            meeting.enter_context(xla.store_of_torch(topology.address, xla_port, place.rank == 0))
            xla.join(place.rank, topology.world_size, xla_port, config.join_timeout_s)
        elif backend == "gloo":
            device.backend = "gloo"  # also between GPUs

    present = Rank(settings, topology)
    with contextlib.ExitStack() as meeting:  # until the roll call has found everybody
        try:
            present.join(load_source, index, adapt)
        except BaseException:
            present.stop()
            raise
    mine = next(each for each in present.reports if each.rank == place.rank)
    _logger.info(
        "Worker %d: %s device initialized: %s for worker rank %d (physical device %s)",
        place.rank, present.runtime.name.upper(), mine.device, place.rank, mine.physical_device,
    )  # fmt: skip
    session.begin(Session(config, settings, present))
    return Joined(present.reports, present.roll_call_seconds, present.runtime.addressable_device_count())


def join_limit(config: WorkerSettings) -> float:
    """The longest that joining takes by its own limits: ways to join XLA, the store, the roll call, its proof."""
    return (4 + len(xla.WAYS_TO_JOIN)) * config.join_timeout_s


def set_rank_variables() -> None:
    topology = session.current().present.topology
    variables = topology.to_env()
    device = str(session.current().present.runtime.device)
    # As Ray's own backend has it.
    more = {"NODE_RANK": str(topology.place.host_index), "ACCELERATE_TORCH_DEVICE": device}
    os.environ.update({**variables, **more})


def leave() -> None:
    session.end()


def _settings(config: WorkerSettings, backend: str, worker: WorkerInfo, world_size: int) -> RunSettings:
    settings = checked_settings(config.settings)
    limits = {"rendezvous": config.join_timeout_s, "collective": float(config.timeout_s)}
    sections = {
        "timeouts": settings.timeouts.model_copy(update=limits),
        "launch": settings.launch.model_copy(update={"share_devices": config.share_devices}),
    }
    settings = settings.model_copy(update={"runtime": "cuda" if worker.gpus else "cpu", **sections})
    if backend not in XLA_BACKENDS:
        return settings
    memory = (config.xla_memory_fraction, config.xla_memory_preallocate)
    return xla.run_settings(settings, config.xla_spmd_config, memory, worker, world_size)


def _source_loader(config: WorkerSettings, settings: RunSettings, rank: int, host: str) -> Callable[[], Any]:
    task = config.task or (settings.task.type if isinstance(settings, RunConfig) else None)

    def load() -> Any:
        if task is None:
            return None
        try:
            return import_object(task, "task")
        except (ConfigError, ImportError, SyntaxError) as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"rank {rank} on {host}: the task's code cannot be imported on this worker: {kind}{error}. What a task "
                "imports must be installed on every node, or travel there: runtime_env={'working_dir': ...}, "
                "{'py_modules': [...]} or {'pip': [...]}"
            ) from None

    return load
