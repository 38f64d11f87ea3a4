"""Where Ray put the workers, and what that makes of each: pure functions from what they say to their topologies."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from lockstep.distributed.topology import Place, Topology
from lockstep.errors import LaunchError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of where it is."""

    node: str
    host: str
    address: str
    free_port: int
    gpus: tuple[str, ...] = ()  # what Ray gave to this worker
    visible_gpus: tuple[str, ...] = ()  # what it can see, in the order of torch's indices
    tpus: int = 0
    xla_port: int = 1  # free as well


def worker_info() -> WorkerInfo:
    """Runs on a worker."""
    context = ray.get_runtime_context()
    given = context.get_accelerator_ids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return WorkerInfo(
        node=context.get_node_id(),
        host=socket.gethostname(),
        address=ray.util.get_node_ip_address(),
        free_port=_free_port(),
        gpus=tuple(map(str, given.get("GPU", ()))),
        visible_gpus=tuple(each.strip() for each in visible.split(",") if each.strip()),
        tpus=len(given.get("TPU", ())),
        xla_port=_free_port(),
    )


def rendezvous_address(workers: Sequence[WorkerInfo]) -> tuple[str, int]:
    """The address and port of rank 0's store: on loopback, where nobody else needs to reach it."""
    alone = len({worker.address for worker in workers}) == 1
    return LOOPBACK if alone else workers[0].address, workers[0].free_port


def topologies(workers: Sequence[WorkerInfo], address: str, port: int) -> list[Topology]:
    """The topology of every worker, by rank. Nodes are numbered in the order of their first rank."""
    nodes = list(dict.fromkeys(worker.node for worker in workers))
    members = {node: [rank for rank, worker in enumerate(workers) if worker.node == node] for node in nodes}
    names = _node_names(workers)
    return [
        Topology(
            place=Place(
                rank=rank,
                local_rank=members[worker.node].index(rank),
                host_index=nodes.index(worker.node),
                host=names[worker.node],
            ),
            world_size=len(workers),
            local_world_size=len(members[worker.node]),
            address=address,
            port=port,
            hosts=len(nodes),
        )
        for rank, worker in enumerate(workers)
    ]


def device_index(worker: WorkerInfo, local_rank: int) -> int:
    """The GPU that Ray gave to a worker, as torch counts those it sees; its local rank where Ray does not say."""
    if not worker.gpus:
        return local_rank
    if worker.gpus[0] in worker.visible_gpus:
        return worker.visible_gpus.index(worker.gpus[0])
    raise LaunchError(
        f"Ray gave GPU {worker.gpus[0]} on {worker.host} to a worker whose CUDA_VISIBLE_DEVICES is "
        f"{','.join(worker.visible_gpus) or 'empty'}: leave that variable to Ray"
    )


def _node_names(workers: Sequence[WorkerInfo]) -> Mapping[str, str]:
    """Hosts by name; nodes that share one are told apart by their ids."""
    nodes: dict[str, set[str]] = {}
    for worker in workers:
        nodes.setdefault(worker.host, set()).add(worker.node)
    return {
        worker.node: worker.host if len(nodes[worker.host]) == 1 else f"{worker.host}/{worker.node[:8]}"
        for worker in workers
    }


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
