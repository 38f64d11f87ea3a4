"""What runs on every Ray worker: a rank of `lockstep train`, from the driver's order to its last report."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
import torch

from lockstep import worker
from lockstep.config.load import validate
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, RankStalled
from lockstep.failure import Report, report
from lockstep.ray.relay import Relay, RelayedDisplay, RelayedLog, printing_through
from lockstep.ray.reports import Reports
from lockstep.topology import Place, Topology
from lockstep.train.task import import_object


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker. Plain data, and the desk to report to."""

    config: Mapping[str, Any]
    folder: str  # the run's folder, on storage that all nodes have
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
    desk: Any
    threads: int
    here: str | None  # the driver's working directory, where workers share its machine
    loopback: str | None  # the network interface to use, where all workers are on one machine


def main(order: Order) -> None:
    """Train as one rank. Returns where the run is over, in whatever way; raises where Ray may try again."""
    topology = _topology()
    rank, host = topology.place.rank, topology.place.host
    relay = Relay(order.desk, rank)
    if not relay.may_begin():
        return
    with relay.running():
        relay.send("started", host=host)
        try:
            _settle(order)
            config = _config(order, rank, host)
            reports = Reports(rank, Path(order.folder))
            relayed = {"screen": RelayedDisplay(relay), "log": RelayedLog(relay)} if rank == 0 else {}
            outlet = worker.Outlet(
                relay.requests,
                stalled=lambda message: relay.failed(_stalled(rank, host, message)),
                measured=reports.measured,
                **relayed,  # type: ignore[arg-type]
            )
            with printing_through(relay) if rank == 0 else contextlib.nullcontext():
                code = worker.train(config, topology, lambda: Path(order.folder), outlet)
            reports.finish()
            relay.send("ended", exit_code=code)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the driver may be what is gone
                relay.failed(report(error, rank, host))
            raise


def _settle(order: Order) -> None:
    if order.here is not None:
        os.chdir(order.here)
    if order.loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", order.loopback)
    torch.set_num_threads(order.threads)


def _config(order: Order, rank: int, host: str) -> RunConfig:
    """The config as it is on this node: the task's file in the folder that travelled here, and proven to import."""
    if not (Path(order.folder) / order.mark).exists():
        raise ConfigError(
            f"rank {rank} on {host}: {order.folder} is not the run's folder there. Nodes with disks of their own need a "
            "folder that all of them share: name it in launch.ray.storage"
        )
    config = validate(RunConfig, order.config, {}, "the driver's order")
    module, _, name = config.task.type.rpartition(":")
    if module.endswith(".py"):
        task = config.task.model_copy(update={"type": f"{Path(module).resolve()}:{name}"})
        config = config.model_copy(update={"task": task})
    try:
        import_object(config.task.type, "task")
    except (ImportError, FileNotFoundError, SyntaxError) as error:
        raise ConfigError(
            f"task: {config.task.type} cannot be imported on {host} (rank {rank}): {type(error).__name__}: {error}. What a "
            "task imports must be installed on every node, or travel: in the task's folder, or by "
            "launch.ray.runtime_env (pip, py_modules)"
        ) from None
    return config


def _stalled(rank: int, host: str, message: str) -> Report:
    return report(RankStalled(message), rank, host)


def _topology() -> Topology:
    context = ray.train.get_context()
    rank = context.get_world_rank()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = ray.util.get_node_ip_address()
    address, port = ray.train.collective.broadcast_from_rank_zero((address, port))
    node = ray.get_runtime_context().get_node_id()[:8]
    return Topology(Place(rank, context.get_local_rank(), context.get_node_rank(), f"{socket.gethostname()}/{node}"),
        context.get_world_size(), context.get_local_world_size(), address, port)
