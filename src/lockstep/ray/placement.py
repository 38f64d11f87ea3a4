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
class Spot:
    """What a worker says of where it is."""

    node: str
    host: str
    address: str
    free_port: int
    gpus: tuple[str, ...] = ()  # what Ray gave to this worker
    visible_gpus: tuple[str, ...] = ()  # what it can see, in the order of torch's indices
    tpus: int = 0


def look_around() -> Spot:
    """Runs on a worker."""
    context = ray.get_runtime_context()
    given = context.get_accelerator_ids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Spot(
        node=context.get_node_id(),
        host=socket.gethostname(),
        address=ray.util.get_node_ip_address(),
        free_port=_free_port(),
        gpus=tuple(map(str, given.get("GPU", ()))),
        visible_gpus=tuple(each.strip() for each in visible.split(",") if each.strip()),
        tpus=len(given.get("TPU", ())),
    )


def meeting_place(spots: Sequence[Spot]) -> tuple[str, int]:
    """The address and port of rank 0's store: on loopback, where nobody else needs to reach it."""
    alone = len({spot.address for spot in spots}) == 1
    return LOOPBACK if alone else spots[0].address, spots[0].free_port


def topologies(spots: Sequence[Spot], address: str, port: int) -> list[Topology]:
    """The topology of every worker, by rank. Nodes are numbered in the order of their first rank."""
    nodes = list(dict.fromkeys(spot.node for spot in spots))
    members = {node: [rank for rank, spot in enumerate(spots) if spot.node == node] for node in nodes}
    names = _node_names(spots)
    return [
        Topology(
            place=Place(
                rank=rank,
                local_rank=members[spot.node].index(rank),
                host_index=nodes.index(spot.node),
                host=names[spot.node],
            ),
            world_size=len(spots),
            local_world_size=len(members[spot.node]),
            address=address,
            port=port,
            hosts=len(nodes),
        )
        for rank, spot in enumerate(spots)
    ]


def device_index(spot: Spot, local_rank: int) -> int:
    """The GPU that Ray gave to a worker, as torch counts those it sees; its local rank where Ray does not say."""
    if not spot.gpus:
        return local_rank
    if spot.gpus[0] in spot.visible_gpus:
        return spot.visible_gpus.index(spot.gpus[0])
    raise LaunchError(
        f"Ray gave GPU {spot.gpus[0]} on {spot.host} to a worker whose CUDA_VISIBLE_DEVICES is "
        f"{','.join(spot.visible_gpus) or 'empty'}: leave that variable to Ray"
    )


def _node_names(spots: Sequence[Spot]) -> Mapping[str, str]:
    """Hosts by name; nodes that share one are told apart by their ids."""
    nodes: dict[str, set[str]] = {}
    for spot in spots:
        nodes.setdefault(spot.host, set()).add(spot.node)
    return {spot.node: spot.host if len(nodes[spot.host]) == 1 else f"{spot.host}/{spot.node[:8]}" for spot in spots}


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
