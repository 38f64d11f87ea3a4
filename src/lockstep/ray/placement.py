"""Where workers run: whether a cluster has room for them, and the topology that follows from where Ray put them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from lockstep.config.schema import RayCluster, RunConfig
from lockstep.distributed.topology import Place, Topology
from lockstep.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"
_AT_ONCE_SECONDS = 5.0  # after which a message says that it takes time


# Room for the workers


def per_worker(config: RunConfig) -> dict[str, float]:
    """Returns what each worker asks for: a CPU, and a GPU for runtime cuda, unless the config says otherwise."""
    usual = {"CPU": 1.0, **({"GPU": 1.0} if config.runtime == "cuda" else {})}
    return {name: amount for name, amount in {**usual, **config.launch.ray.resources}.items() if amount > 0}


def scaling(settings: RayCluster, workers: int, resources: Mapping[str, float]) -> ScalingConfig:
    """Returns Ray's ScalingConfig, which repeats GPUs and TPUs and names the slice that TPU workers form."""
    try:
        return ScalingConfig(
            num_workers=workers,
            resources_per_worker=dict(resources),
            placement_strategy=settings.placement,
            use_gpu="GPU" in resources,
            use_tpu="TPU" in resources,
            topology=settings.topology,
            accelerator_type=settings.accelerator,
        )
    except ValueError as error:
        raise ConfigError(f"launch.ray: {workers} workers with {amounts(resources)} each: {error}") from None


def find(settings: RayCluster, workers: int, resources: Mapping[str, float]) -> int:
    """Returns how many workers the cluster places: all, or as many as fit, if launch.ray.min_workers allows it."""
    limit = settings.placement_timeout
    each = f"with {amounts(resources)} each ({settings.placement})"
    if _placed(workers, resources, settings.placement, min(limit, _AT_ONCE_SECONDS)):
        return workers
    if limit > _AT_ONCE_SECONDS:
        click.echo(f"lockstep: waiting for room for {workers} workers {each}; {_free(resources)}", err=True)
        if _placed(workers, resources, settings.placement, limit - _AT_ONCE_SECONDS):
            return workers
    fewest = settings.min_workers or workers
    for size in range(workers - 1, fewest - 1, -1):
        if _placed(size, resources, settings.placement, _AT_ONCE_SECONDS):
            click.echo(f"lockstep: there is room for {size} of {workers} workers: continuing with {size}", err=True)
            return size
    raise LaunchError(
        f"launch.ray: the cluster has no room for {fewest} workers {each} in {limit:g} s "
        f"(launch.ray.placement_timeout): {_free(resources)}. Lower processes or launch.ray.resources, choose another "
        "launch.ray.placement, or wait until others are done"
    )


def amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _placed(workers: int, resources: Mapping[str, float], strategy: str, limit: float) -> bool:
    """Asks the cluster itself, which knows what is free where and may grow when asked."""
    group = placement_group([dict(resources)] * workers, strategy=strategy)
    try:
        return bool(group.wait(timeout_seconds=max(limit, 0.1)))
    finally:
        remove_placement_group(group)


def _free(resources: Mapping[str, float]) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    shown = ", ".join(f"{name} {free.get(name, 0):g} of {total.get(name, 0):g}" for name in resources)
    return f"free are {shown}, on {nodes} node{'s' if nodes > 1 else ''}"


# Where Ray put them


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
    """Returns the address and port of rank 0's store: on loopback if all workers are on one host."""
    alone = len({worker.address for worker in workers}) == 1
    return LOOPBACK if alone else workers[0].address, workers[0].free_port


def topologies(workers: Sequence[WorkerInfo], address: str, port: int) -> list[Topology]:
    """Returns the topology of every worker, by rank. Nodes are numbered in the order of their first rank."""
    nodes = list(dict.fromkeys(worker.node for worker in workers))
    members = {node: [rank for rank, worker in enumerate(workers) if worker.node == node] for node in nodes}
    hosts = {worker.node: worker.host for worker in workers}
    found = []
    for rank, worker in enumerate(workers):
        # Nodes that share a host are distinguished by their ids.
        unique = list(hosts.values()).count(worker.host) == 1
        place = Place(
            rank=rank,
            local_rank=members[worker.node].index(rank),
            host_index=nodes.index(worker.node),
            host=worker.host if unique else f"{worker.host}/{worker.node[:8]}",
        )
        local = len(members[worker.node])
        found.append(Topology(place, len(workers), local, address=address, port=port, hosts=len(nodes)))
    return found


def device_index(worker: WorkerInfo, local_rank: int) -> int:
    """Returns torch's index of the GPU that Ray gave to a worker; its local rank if Ray does not say."""
    if not worker.gpus:
        return local_rank
    if worker.gpus[0] in worker.visible_gpus:
        return worker.visible_gpus.index(worker.gpus[0])
    raise LaunchError(
        f"Ray gave GPU {worker.gpus[0]} on {worker.host} to a worker whose CUDA_VISIBLE_DEVICES is "
        f"{','.join(worker.visible_gpus) or 'empty'}: leave that variable to Ray"
    )


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
