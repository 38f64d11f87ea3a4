"""Who takes part in a run, and this process's own place in it.

With batch.py the only module that reads rank variables from the environment. A process becomes a Topology once; from
there on rank and world size are passed as parameters.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.distributed import batch
from lockstep.distributed.batch import BatchTask, batch_task
from lockstep.errors import TopologyError

_LAUNCHED, _WATCHED, STORE = "LOCKSTEP_LAUNCHED", "LOCKSTEP_WATCHED", "LOCKSTEPSTORE"
_SECRET = "LOCKSTEP_SECRET"
# In place of the path of a socket: our launcher serves the store at MASTER_ADDR, and asks for the run's secret.
NETWORK_STORE = "tcp"
_PLACE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_POD_PORT = 29500  # where the first host of a pod serves the store, unless MASTER_PORT says otherwise


@dataclass(frozen=True)
class Place:
    """Where one process stands: its rank among all, its rank on its host, and its host."""

    rank: int = 0
    local_rank: int = 0
    host_index: int = 0
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Topology:
    """All processes of a run, the address where they meet, and the place of this one."""

    place: Place = field(default_factory=Place)
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    # Restarts so far: every attempt meets under its own prefix in the same store.
    attempt: int = 0
    # `lockstep resume` started these processes, to go on with a run.
    resumes: bool = False
    # The launcher already serves a store of torch's at address:port, so nobody must open a second one there.
    launcher_serves_store: bool = False
    # The Unix socket of our own launcher's store, where it started this process; or that it is on the network.
    store: str = ""
    # What ranks on several hosts know and nobody else does; never shown, and never passed on by `to_env`.
    secret: str = field(default="", repr=False)
    # Our own launcher started this process: the terminal is its, and it speaks for all ranks.
    launched_by_us: bool = False
    # It also reads the heartbeats, and ends those that do not get on.
    watched: bool = False
    # How many hosts there are, where a cluster engine put different numbers of processes on them.
    hosts: int | None = None

    def __post_init__(self) -> None:
        place = self.place
        if self.world_size < 1:
            raise TopologyError(f"the world size is {self.world_size}; it must be at least 1")
        if not 0 <= place.rank < self.world_size:
            raise TopologyError(f"rank {place.rank} does not exist in a world of {self.world_size} (ranks start at 0)")
        if not 0 <= place.local_rank < self.local_world_size:
            raise TopologyError(
                f"rank {place.rank}: local rank {place.local_rank} does not exist on a host with "
                f"{self.local_world_size} processes"
            )
        if self.hosts is None and self.world_size % self.local_world_size:
            raise TopologyError(f"{self.world_size} processes in all cannot be {self.local_world_size} on every host")
        if self.world_size > 1 and not 0 < self.port < 65536:
            raise TopologyError(f"{self.world_size} processes need a port to meet at, got {self.port}")

    @property
    def host_count(self) -> int:
        return self.hosts or self.world_size // self.local_world_size

    def to_env(self) -> dict[str, str]:
        """The variables that torchrun sets, so that any script written for it finds what it expects."""
        return {
            "RANK": str(self.place.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.place.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.place.host_index),
            "GROUP_WORLD_SIZE": str(self.host_count),
            "ROLE_RANK": str(self.place.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "lockstep" if self.launched_by_us else "none",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.launcher_serves_store),
            **({_LAUNCHED: "1"} if self.launched_by_us else {}),
            **({_WATCHED: "1"} if self.watched else {}),
            **({STORE: self.store} if self.store else {}),
        }

    def tell(self, env: MutableMapping[str, str]) -> None:
        """For code of others in this process, which looks for its rank where torchrun would have put it."""
        told = self.to_env()
        env.update({name: told[name] for name in _PLACE})

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Read what torchrun, our own launcher, SLURM or MPI says. Without any of it: one process on its own."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            if len(_pod_hosts(env)) > 1:
                return cls._on_a_pod(env)
            task = batch_task(env)
            return cls() if task is None else cls._of_task(task, env)
        rank = _number(env, "RANK")
        world_size = _number(env, "WORLD_SIZE")
        local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=world_size)
        uneven = local_world_size > 0 and world_size % local_world_size != 0
        return cls(
            place=Place(
                rank=rank,
                local_rank=_number(env, "LOCAL_RANK", default=rank % max(local_world_size, 1)),
                host_index=_number(env, "GROUP_RANK", default=rank // max(local_world_size, 1)),
            ),
            world_size=world_size,
            local_world_size=local_world_size,
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT", default=0),
            attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
            launcher_serves_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store=env.get(STORE, ""),
            secret=env.get(_SECRET, ""),
            launched_by_us=env.get(_LAUNCHED) == "1",
            watched=env.get(_WATCHED) == "1",
            hosts=_number(env, "GROUP_WORLD_SIZE") if uneven and "GROUP_WORLD_SIZE" in env else None,
        )

    @classmethod
    def _on_a_pod(cls, env: Mapping[str, str]) -> Topology:
        """One process per host, as the TPU's own variables name them: the same command on every host is a run."""
        worker_id, hosts = tpu_pod(env) or ("", [])
        worker = _number({"TPU_WORKER_ID": worker_id}, "TPU_WORKER_ID")
        place = Place(rank=worker, host_index=worker)
        port = _number(env, "MASTER_PORT", _POD_PORT)
        secret = env.get(_SECRET, "")
        return cls(place=place, world_size=len(hosts), address=hosts[0], port=port, secret=secret)

    @classmethod
    def _of_task(cls, task: BatchTask, env: Mapping[str, str]) -> Topology:
        host = {} if task.host is None else {"host": task.host}
        return cls(
            place=Place(task.rank, task.local_rank, task.host_index, **host),
            world_size=task.size,
            local_world_size=task.local_size,
            address=task.address,
            port=task.port,
            attempt=task.attempt,
            secret=env.get(_SECRET, ""),
            hosts=task.hosts,
        )


def launched(env: Mapping[str, str]) -> bool:
    """Whether some launcher, or the pod that this host belongs to, has already given this process a rank.

    Raises where something started several processes alike and does not say how many: each of them would take itself
    for the whole run.
    """
    return has_rank(env) or batch_task(env) is not None


def has_rank(env: Mapping[str, str]) -> bool:
    """By torchrun, by our own launcher, or as a host of a pod: these know better than a batch system."""
    return "RANK" in env or "WORLD_SIZE" in env or len(_pod_hosts(env)) > 1


def without_place(env: Mapping[str, str]) -> dict[str, str]:
    """An environment that says nothing of a rank or a task: for a process that is to stand for itself."""
    place = {*Topology().to_env(), _LAUNCHED, _WATCHED, STORE, *batch.names()}
    return {name: value for name, value in env.items() if name not in place}


def _pod_hosts(env: Mapping[str, str]) -> list[str]:
    pod = tpu_pod(env)
    return pod.hosts if pod else []


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`: how messages name them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise TopologyError(f"{other} is set but {name} is not: start the script with torchrun or `lockstep run`")
        return default
    try:
        return int(text)
    except ValueError:
        raise TopologyError(f"{name}={text!r} in the environment is not a whole number") from None


_SERVER, _OVERRIDE = "metadata.google.internal", "GCE_METADATA_HOST"  # the name that Google's own libraries have for it
_TIMEOUT, _LARGEST = 3.0, 1_000_000


class TpuPod(NamedTuple):
    worker: str  # its number, as it stands there
    hosts: list[str]


def tpu_pod(env: Mapping[str, str]) -> TpuPod | None:
    """The TPU pod that a process with this environment is to use; none where it is to use one host alone.

    Kubernetes sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES. On Cloud TPU VMs the metadata server knows the same, and JAX
    and torch_xla ask it, too.
    """
    if not env.get("PJRT_DEVICE", "").upper().startswith("TPU") or _alone(env):
        return None
    if "TPU_WORKER_ID" in env:
        worker, named = env["TPU_WORKER_ID"], env.get("TPU_WORKER_HOSTNAMES", "")
    else:
        worker, named = _from_metadata(env.get(_OVERRIDE, "")) or ("", "")
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    return TpuPod(worker, hosts) if len(hosts) > 1 else None


def _alone(env: Mapping[str, str]) -> bool:
    """Chips of this host were picked, as for one that is no part of a pod."""
    return env.get("TPU_PROCESS_BOUNDS") == "1,1,1" and bool(env.get("TPU_VISIBLE_CHIPS"))


@functools.cache
def _from_metadata(server: str) -> tuple[str, str] | None:
    if not server and not _on_compute_engine():
        return None
    worker = _attribute(server or _SERVER, "agent-worker-number")
    endpoints = _attribute(server or _SERVER, "worker-network-endpoints")
    if worker is None or endpoints is None or not worker.isdecimal():
        return None
    # NAME:PORT:ADDRESS of every worker, in their order.
    hosts = [endpoint.strip().split(":")[2:3] for endpoint in endpoints.split(",")]
    if not all(host and re.fullmatch(r"[\w.-]{1,255}", host[0], re.ASCII) for host in hosts):
        return None
    return worker, ",".join(host[0] for host in hosts)


def _on_compute_engine() -> bool:
    try:
        return Path("/sys/class/dmi/id/product_name").read_text().strip() == "Google Compute Engine"
    except OSError:
        return False


def _attribute(server: str, name: str) -> str | None:
    import urllib.request

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy would be asked for a host that is this one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return str(answer.read(_LARGEST).decode())
    except (OSError, ValueError):
        return None  # not a host of a TPU pod, or nobody to ask
