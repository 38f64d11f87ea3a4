"""How ranks find each other: the store where they leave word, and the groups that they form.

Growth with the number of ranks: the store has two connections from every rank. Gloo connects ranks only when they
first talk: a gathering goes round in a ring, so every rank is connected to two others, and a broadcast of a long
message adds about log2(N) more. Nobody but the store is ever connected to all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.errors import RollCallError
from lockstep.runtime.base import Runtime
from lockstep.runtime.environment import with_variables

_meetings = itertools.count()  # of this process; the same on all ranks, as they all run the same program


def meet(topology: Topology, limit: float) -> tuple[Any, Any]:
    """Two connections to the store where all ranks leave word: a thread that waits on one holds up nobody on the other.

    A process on its own has none.
    """
    if topology.world_size == 1 and not topology.watched:
        return None, None
    serves = topology.place.rank == 0 and not topology.launcher_serves_store
    prefix = store_prefix(topology.attempt, next(_meetings))
    first, second = _connect(topology, serves, limit), _connect(topology, False, limit)
    return PrefixStore(prefix, first), PrefixStore(prefix, second)


def store_prefix(attempt: int, meeting: int = 0) -> str:
    """A script may launch more than once; what one meeting left in the store says nothing about the next."""
    return f"lockstep/attempt-{attempt}/meeting-{meeting}"


def join(topology: Topology, runtime: Runtime, store: Any, timeout: float, activity: Activity | None = None) -> Group:
    """Form the group with all other ranks, with explicit rank, world size and limit."""
    rank, world_size = topology.place.rank, topology.world_size
    if world_size == 1:
        return Group(0, 1, timeout, activity=activity)
    limit = timedelta(seconds=timeout)
    extra: dict[str, Any] = {"device_id": runtime.device} if runtime.backend == "nccl" else {}
    with _connecting_when_needed():
        dist.init_process_group(runtime.backend, store=store, rank=rank, world_size=world_size, timeout=limit, **extra)
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RollCallError(
                f"this process was started as rank {rank} of {world_size}, but the group says it is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        control = dist.new_group(backend="gloo", timeout=limit)
    return Group(rank, world_size, timeout, store, control, activity)


def _connecting_when_needed() -> contextlib.AbstractContextManager[None]:
    """Let gloo open the connections that are used, and not one between every two ranks."""
    name = "TORCH_GLOO_LAZY_INIT"
    return with_variables({name: os.environ.get(name, "1")})


def _connect(topology: Topology, serves: bool, limit: float) -> Any:
    try:
        return TCPStore(
            topology.address,
            topology.port,
            is_master=serves,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            **(_listening_on_loopback(topology) if serves else {}),
        )
    except (RuntimeError, dist.DistError) as error:
        if serves and "use" in str(error):
            raise RollCallError(
                f"rank 0 on {topology.place.host}: port {topology.port} is in use on this host (MASTER_PORT), where "
                "rank 0 serves the store. RANK=0 is given to another process as well, or another run has that port"
            ) from None
        raise RollCallError(
            f"rank {topology.place.rank} on {topology.place.host}: nobody answers at {topology.address}:"
            f"{topology.port} within {limit:g} s, where rank 0 or the launcher should be. Check that rank 0 was "
            f"started, the address, the port and the firewall ({str(error).strip().splitlines()[0]}); "
            "launch.join_timeout sets the limit"
        ) from None


def _listening_on_loopback(topology: Topology) -> dict[str, Any]:
    """Where all ranks are on this host, nobody else needs to reach the store; torch would listen everywhere."""
    if topology.address not in ("127.0.0.1", "localhost"):
        return {}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", topology.port))
    except OSError as error:
        listener.close()
        raise RuntimeError(f"address already in use: {error}") from None
    listener.listen(1024)
    return {"master_listen_fd": listener.detach()}


def port_in_use(port: int) -> str:
    return (
        f"launch.port: port {port} is already in use on this host. "
        "Leave launch.port out and a free one is picked, or name another"
    )
