"""What XLA workers need beyond the others: torch_xla itself, settings from what Ray gave them, a world, a mesh.

torch_xla is imported inside the functions that run on a worker, once its variables are set.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from lockstep.config.schema import RunSettings, Xla
from lockstep.errors import ConfigError, RollCallError
from lockstep.ray.placement import WorkerInfo
from lockstep.runtime import pjrt, with_variables

logger = logging.getLogger("ray.train.lockstep")  # which Ray brings to the driver

XLA_BACKENDS = ("xla", "xla_tpu")
SPMD_KEYS = ("mesh_shape", "data_parallel_size", "model_parallel_size")
MESH_AXES = ("data", "model")
WAYS_TO_JOIN = ("xla://", "env://")
THROUGH_THE_HOST = "host"


def require_torch_xla(who: str) -> None:
    """Raises ImportError if torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ImportError(
            f"{who}: an XLA backend needs torch_xla, which is not installed there. Install it on every node: "
            "pip install 'lockstep-train[xla]' (torch_xla 2.9.0 with torch 2.9.0)"
        )


def check_spmd_config(spmd: Mapping[str, Any]) -> None:
    """Raises ConfigError for what cannot be a mesh, whatever the devices are."""
    unknown = [key for key in spmd if key not in SPMD_KEYS]
    if unknown:
        raise ConfigError(f"xla_spmd_config: {unknown[0]!r} is not known; the keys are {', '.join(SPMD_KEYS)}")
    for key in SPMD_KEYS[1:]:
        if key in spmd and not _is_size(spmd[key]):
            raise ConfigError(f"xla_spmd_config: {key}={spmd[key]!r} must be a whole number greater than 0")
    if "mesh_shape" in spmd:
        shape = spmd["mesh_shape"]
        if not isinstance(shape, (list, tuple)) or len(shape) != 2 or not all(map(_is_size, shape)):
            raise ConfigError(
                f"xla_spmd_config: mesh_shape={shape!r} must be two whole numbers greater than 0: data, model"
            )
        for key, size in zip(SPMD_KEYS[1:], shape, strict=True):
            if spmd.get(key, size) != size:
                raise ConfigError(f"xla_spmd_config: mesh_shape={shape!r} contradicts {key}={spmd[key]!r}")


def mesh_shape(spmd: Mapping[str, Any], devices: int) -> tuple[int, int]:
    """Returns the sizes of the data and the model axis; one that is not given takes the rest of the devices."""
    check_spmd_config(spmd)
    data, model = spmd.get("mesh_shape", (spmd.get("data_parallel_size"), spmd.get("model_parallel_size")))
    if data is None and model is None:
        data, model = devices, 1
    elif data is None:
        data = max(devices // model, 1)
    elif model is None:
        model = max(devices // data, 1)
    if data * model != devices:
        raise ConfigError(
            f"xla_spmd_config: {data} x {model} (data x model) is a mesh of {data * model} devices, but the workers "
            f"have {devices} together; change num_workers, or sizes whose product is {devices}"
        )
    return data, model


def run_settings(
    settings: RunSettings,
    spmd: Mapping[str, Any] | None,
    memory: tuple[float | None, bool | None],
    worker: WorkerInfo,
    world: int,
) -> RunSettings:
    """Returns the settings of a run on XLA devices: the family that Ray gave the workers, memory limits, mesh."""
    fraction, preallocate = memory
    family = (
        settings.xla.device
        or os.environ.get(pjrt.DEVICE)
        or ("TPU" if worker.tpus else "CUDA" if worker.gpus else "CPU")
    )
    given = {"device": family, "memory_fraction": fraction, "preallocate": preallocate}
    section = settings.xla.model_dump() | {name: value for name, value in given.items() if value is not None}
    settings = settings.model_copy(update={"runtime": "xla", "xla": Xla(**section)})
    return settings if spmd is None else _with_mesh(settings, spmd, family, world)


def _with_mesh(settings: RunSettings, spmd: Mapping[str, Any], family: str, world: int) -> RunSettings:
    check_spmd_config(spmd)
    data, model = spmd.get("mesh_shape", (spmd.get("data_parallel_size"), spmd.get("model_parallel_size")))
    if family == "CPU" and world > 1:
        # Every process there is a separate world: nothing but copies of the model can span them.
        shape = dict(zip(MESH_AXES, mesh_shape(spmd, world), strict=True))
        if shape["model"] != 1:
            raise ConfigError(
                f"xla_spmd_config: {dict(spmd)}: on PJRT CPU no mesh spans the {world} workers, so that "
                "model_parallel_size must be 1; one worker can have many CPU devices"
            )
        strategy = settings.strategy.model_copy(update={"type": "ddp", "mesh": shape})
        return settings.model_copy(update={"strategy": strategy})
    mesh = {"data": data or -1, "model": model or (1 if data is None else -1)}
    type = settings.strategy.type if settings.strategy.has_mesh else "spmd"
    update: dict[str, Any] = {"strategy": settings.strategy.model_copy(update={"type": type, "mesh": mesh})}
    if family == "CPU" and settings.devices == "auto":  # pretend to have as many as the mesh needs
        update["devices"] = (data or 1) * (model or 1)
    return settings.model_copy(update=update)


def join(rank: int, world_size: int, port: int, limit: float) -> str:
    """Tries the device group as `xla://`, then as `env://`; returns which of them gives a world of the right size.

    MASTER_ADDR is set, and rank 0 serves a torch store there, at this port. If neither does (PJRT CPU), collectives go
    through the host, and the log says so. Each way is checked by what the device runtime believes. The group of torch
    is left again: collectives are part of the compiled programs, and the run's group is of the hosts.
    """
    if not 0 <= rank < world_size:
        raise RollCallError(f"rank {rank} does not exist in a world of {world_size} (ranks start at 0)")
    for number, way in enumerate(WAYS_TO_JOIN):
        try:
            with _with_the_store_that_is_there(number, port):
                attempt = functools.partial(_try_to_join, way, rank, world_size, limit)
                believed = _within(limit, attempt, f"joining by {way}")
        except Exception as error:
            logger.warning("Worker %d: joining by %s failed: %s", rank, way, _first_line(error))
            continue
        finally:
            _leave()
        if believed == world_size:
            logger.info("Worker %d: joined by %s, a world of %d", rank, way, world_size)
            return way
        logger.warning(
            "Worker %d: joined by %s, but the device runtime believes in a world of %d instead of %d",
            rank, way, believed, world_size,
        )  # fmt: skip
    logger.warning(
        "Worker %d: no XLA collectives across the %d workers here: gradients are reduced through the host",
        rank, world_size,
    )  # fmt: skip
    return THROUGH_THE_HOST


@contextlib.contextmanager
def store_of_torch(address: str, port: int, serves: bool) -> Iterator[None]:
    """Serves the store where torch and torch_xla meet, on rank 0: unlike the run's store, it asks for no secret."""
    from torch._C._distributed_c10d import TCPStore

    from lockstep.distributed.store.server import listen_on_tcp

    store = None
    if serves:
        listener = listen_on_tcp(address, port)  # torch would listen at all addresses
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield
    del store


def _with_the_store_that_is_there(attempt: int, port: int) -> contextlib.AbstractContextManager[None]:
    """Has torch and torch_xla connect to the store as torchrun's workers do, without serving another."""
    as_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    return with_variables({**as_torchrun, "MASTER_PORT": str(port)})


def _try_to_join(way: str, rank: int, world_size: int, limit: float) -> int:
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend
    from torch_xla import runtime as xr

    dist.init_process_group("xla", init_method=way, rank=rank, world_size=world_size, timeout=timedelta(seconds=limit))
    return int(xr.world_size())


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _within(limit: float, work: Callable[[], int], name: str) -> int:
    """Gives up on native code, which may not keep its own limits."""
    outcome: list[Any] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, name=f"lockstep-{name}", daemon=True)
    thread.start()
    thread.join(limit)
    if not outcome:
        raise RollCallError(f"{name} took more than {limit:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return int(outcome[0])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
