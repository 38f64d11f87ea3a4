"""`lockstep.ray.TorchConfig` and its Backend, which sets the workers up through Ray's public worker group calls alone.

The Backend runs in the process that controls the workers. It keeps no state: Ray makes one per process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.train.torch
from ray.exceptions import RayError, RayTaskError
from ray.train.backend import Backend

from lockstep.config.load import validate
from lockstep.config.schema import RunSettings
from lockstep.distributed.rollcall.report import SHOWN, table
from lockstep.distributed.store.wire import fresh
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CONSEQUENCES, ConfigError, RankMissing
from lockstep.ray import session
from lockstep.ray.placement import WorkerInfo, rendezvous_address, topologies, worker_info
from lockstep.ray.session import Joined
from lockstep.ray.xla import WAYS_TO_JOIN, XLA_BACKENDS, check_spmd_config, mesh_shape, require_torch_xla

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gloo", "nccl", *XLA_BACKENDS)
_SET_BY_RAY = ("processes", "runtime", "launch")

# How long workers may take to answer at all: the first answer waits for their imports.
_ANSWER_SECONDS = 120.0
# How much longer than the workers themselves the controller waits for them to have joined.
_GRACE_SECONDS = 15.0
_LEAVE_SECONDS = 15.0
# Once a worker has failed, how long the others get to report the cause.
_COMPLETE_SECONDS = 1.0


class TorchBackend(Backend):  # type: ignore[misc]
    """gloo and NCCL. Workers on a node see each other's GPUs, as with Ray's own backend."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Sends the address to all workers, then has them join at once; the roll call proves the world."""
        try:
            self._join(worker_group, backend_config)
        except BaseException:
            _give_back(worker_group)
            raise

    def _join(self, worker_group: Any, backend_config: TorchConfig) -> None:
        backend = _resolved(backend_config.backend, worker_group.get_resources_per_worker())
        if backend_config.xla_spmd_config is not None and backend not in XLA_BACKENDS:
            raise ConfigError(f"TorchConfig: xla_spmd_config is given, but backend='auto' is {backend!r} here")
        if backend in XLA_BACKENDS:
            answer(worker_group.execute_async(_check_torch_xla), "looking for torch_xla", _ANSWER_SECONDS)
        asked = worker_group.execute_async(worker_info)
        workers: list[WorkerInfo] = answer(asked, "saying where they are", _ANSWER_SECONDS)
        address, port = rendezvous_address(workers)
        secret = fresh()  # known to the workers alone
        everyone = [replace(each, secret=secret) for each in topologies(workers, address, port)]
        setting = worker_group.execute_async(session.set_master_address, address, port)
        answer(setting, "setting MASTER_ADDR and MASTER_PORT", _ANSWER_SECONDS)
        futures = [
            worker_group.execute_single_async(
                rank, session.join, everyone[rank], each, backend, backend_config, workers[0].xla_port
            )
            for rank, each in enumerate(workers)
        ]
        # The ways to join XLA, the store, the roll call and its proof each take as long as that.
        limit = (4 + len(WAYS_TO_JOIN)) * backend_config.join_timeout_s + _GRACE_SECONDS
        joined: list[Joined] = answer(futures, "joining the group", limit)
        if backend in XLA_BACKENDS and backend_config.xla_spmd_config is not None:
            mesh_shape(backend_config.xla_spmd_config, sum(each.devices for each in joined))
        _show(joined)

    def on_training_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        answer(worker_group.execute_async(session.set_rank_variables), "setting RANK and the like", _ANSWER_SECONDS)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Has all workers leave the group, without waiting for those that are gone or stuck."""
        leaving = worker_group.execute_async(session.leave)
        left, late = ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        if late:
            ranks = [rank for rank, future in enumerate(leaving) if future in late]
            logger.warning("%s did not leave the group within %g s", ranks_text(ranks), _LEAVE_SECONDS)
        for future in left:
            try:
                ray.get(future)
            except RayError as error:  # what it failed with before is what Ray reports
                logger.debug("a worker could not leave the group: %s", error)


class XlaBackend(TorchBackend):
    """XLA devices. CUDA_VISIBLE_DEVICES is left as Ray sets it: every worker sees its own device."""

    share_cuda_visible_devices = False


def answer(futures: Sequence[Any], name: str, limit: float) -> list[Any]:
    """Returns what every worker returned, by rank; raises the first failure that is no consequence of another."""
    deadline, waiting = time.monotonic() + limit, list(futures)
    failures: dict[int, Exception] = {}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=remaining)
        for future in ready:
            try:
                ray.get(future)
            except RayTaskError as error:
                failures[futures.index(future)] = error.cause if isinstance(error.cause, Exception) else error
            except RayError as error:
                failures[futures.index(future)] = error
        if failures:
            deadline = min(deadline, time.monotonic() + _COMPLETE_SECONDS)
    if failures:
        causes = [each for each in failures.values() if type(each).__name__ not in CONSEQUENCES]
        raise (causes or list(failures.values()))[0] from None
    if waiting:
        ranks = [rank for rank, future in enumerate(futures) if future in waiting]
        raise RankMissing(
            f"{ranks_text(ranks)} of {len(futures)} took more than {limit:g} s for {name}. Look at their logs in Ray's "
            "session folder; TorchConfig(join_timeout_s=...) sets the limit for joining"
        )
    return list(ray.get(list(futures)))


def _give_back(worker_group: Any) -> None:
    """Removes the placement group of workers whose backend did not start: Ray would keep it for ever."""
    asked = worker_group.execute_async(ray.util.get_current_placement_group)
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_LEAVE_SECONDS)
    for future in ready:
        with contextlib.suppress(RayError):  # a worker that is gone; another one knows as well
            found = ray.get(future)
            mine = ray.util.get_current_placement_group()
            if found is not None and (mine is None or mine.id != found.id):  # else Ray Tune's, which takes care of it
                ray.util.remove_placement_group(found)
            return


def _resolved(backend: str, resources: dict[str, float]) -> str:
    gpus, tpus = resources.get("GPU", 0), resources.get("TPU", 0)
    if backend == "auto":
        return "nccl" if gpus else "xla" if tpus else "gloo"
    if backend == "nccl" and not gpus:
        raise ConfigError(
            "TorchConfig: backend='nccl' needs GPUs, and the workers get none: ScalingConfig(use_gpu=True), "
            "or backend='gloo'"
        )
    return backend


def _check_torch_xla() -> None:
    context = ray.get_runtime_context()
    require_torch_xla(f"the worker on node {ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})")


def _show(joined: Sequence[Joined]) -> None:
    """Prints the device of every worker; Ray brings what this process prints to the driver's terminal."""
    reports = joined[0].reports
    more = [f"  and {len(reports) - SHOWN} more"] if len(reports) > SHOWN else []
    head = f"Lockstep: all {len(joined)} workers are here, in {joined[0].seconds:.2f} s"
    print("\n".join([head, *table(reports[:SHOWN]), *more]), flush=True)


@dataclass
class TorchConfig(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """A drop-in for `ray.train.torch.TorchConfig`.

    `backend="auto"` is nccl where workers have GPUs, xla where they have TPUs, else gloo.
    """

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
        for name, most in (("timeout_s", math.inf), ("join_timeout_s", math.inf), ("xla_memory_fraction", 1.0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value <= most):
                limit = f" and at most {most:g}" if most < math.inf else ""
                raise ConfigError(f"TorchConfig: {name}={value!r} must be a number greater than 0{limit}")
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

    @property
    def backend_cls(self) -> type[Backend]:
        return XlaBackend if self.backend in XLA_BACKENDS else TorchBackend

    @property
    def train_func_context(self) -> Any:
        return session.training
