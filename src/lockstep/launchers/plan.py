"""A LaunchPlan: host, arguments and environment of every process, as data."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.distributed.topology import STORE, Place, Topology
from lockstep.launchers.local import limits

# The port is chosen when the launcher opens its store, so that nobody can take it in between.
ANY_PORT = "auto"


@dataclass(frozen=True)
class ProcessPlan:
    host: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class LaunchPlan:
    processes: tuple[ProcessPlan, ...]
    threads: int
    port: int | None = None

    def at(self, port: int, attempt: int, store: str = "") -> LaunchPlan:
        """Returns the plan of one attempt, with the port and the socket of the store."""
        known = {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        known.update({STORE: store} if store else {})
        processes = tuple(replace(each, env={**each.env, **known}) for each in self.processes)
        return replace(self, processes=processes, port=port)

    def render(self) -> str:
        """Returns a line with host, environment and command per process, for people and for a shell."""
        lines = []
        for rank, process in enumerate(self.processes):
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(process.env.items()))
            lines.append(f"rank {rank} on {process.host}: {variables} {shlex.join(process.argv)}")
        return "\n".join(lines)


def local_plan(
    argv: Sequence[str],
    processes: int,
    *,
    threads: int | None = None,
    port: int | None = None,
    cores: int | None = None,
    env: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Plans processes on this host, which meet on the loopback interface."""
    env = os.environ if env is None else env
    threads = thread_count(threads, processes, env, cores)
    shared = {"OMP_NUM_THREADS": str(threads)}
    if processes > 1:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        # Neither asks for a proof: nobody beyond this host may reach them.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            shared[name] = env.get(name, loopback)
    host = socket.gethostname()
    plans = []
    for rank in range(processes):
        place = Place(rank, local_rank=rank, host_index=0, host=host)
        topology = Topology(place, processes, processes, port=port or 1, launched_by_us=True, watched=True)
        variables = {**topology.to_env(), "MASTER_PORT": str(port or ANY_PORT), **shared}
        plans.append(ProcessPlan(host, tuple(argv), variables))
    return LaunchPlan(tuple(plans), threads, port)


def thread_count(asked: int | None, processes: int, env: Mapping[str, str], cores: int | None = None) -> int:
    """Returns the number of threads of each of the processes of a host."""
    text = env.get("OMP_NUM_THREADS", "")
    given = int(text) if text.isdigit() else 0
    return asked or given or max(1, (cores or available_cores()) // processes)


def available_cores() -> int:
    """Returns the number of cores that this process may use; in a container, fewer than the machine has."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = limits.core_limit()
    return present if limit is None else max(1, min(present, int(limit)))
