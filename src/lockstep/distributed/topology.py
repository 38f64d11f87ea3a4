"""The processes of a run, and the place of this one.

Only this module and batch.py read rank variables from the environment; everything else gets rank and world size as
parameters.
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
# Instead of the path of a socket: our launcher serves the store at MASTER_ADDR, with the run's secret.
NETWORK_STORE = "tcp"
_PLACE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_POD_PORT = 29500  # of the store on a pod, unless MASTER_PORT is set


@dataclass(frozen=True)
class Place:
    """The rank of a process, its rank on its host, and its host."""

    rank: int = 0
    local_rank: int = 0
    host_index: int = 0
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Topology:
    """All processes of a run, their address, and the place of this one."""

    place: Place = field(default_factory=Place)
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    attempt: int = 0  # restarts so far; every attempt has its own prefix in the store
    resumes: bool = False  # `lockstep resume` started these processes
    launcher_serves_store: bool = False  # torchrun already serves torch's store at address:port
    store: str = ""  # the Unix socket of our launcher's store, or NETWORK_STORE
    secret: str = field(default="", repr=False)  # shared by ranks on several hosts; not part of `to_env`
    launched_by_us: bool = False
    watched: bool = False  # our launcher reads the heartbeats and ends stuck ranks
    hosts: int | None = None  # set if hosts have different numbers of processes

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
        """Returns torchrun's variables."""
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
        """Sets torchrun's variables for other code in this process."""
        variables = self.to_env()
        env.update({name: variables[name] for name in _PLACE})

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Reads the variables of torchrun, our launcher, SLURM or MPI; without them, returns a single process."""
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
            world_size=world_size, local_world_size=local_world_size,
            hosts=_number(env, "GROUP_WORLD_SIZE") if uneven and "GROUP_WORLD_SIZE" in env else None,
            address=env.get("MASTER_ADDR", "127.0.0.1"), port=_number(env, "MASTER_PORT", default=0),
            attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
            launcher_serves_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store=env.get(STORE, ""), secret=env.get(_SECRET, ""),
            launched_by_us=env.get(_LAUNCHED) == "1", watched=env.get(_WATCHED) == "1",
        )  # fmt: skip

    @classmethod
    def _on_a_pod(cls, env: Mapping[str, str]) -> Topology:
        """One process per host, from the TPU's variables: the same command on every host is a run."""
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
            Place(task.rank, task.local_rank, task.host_index, **host), task.size, task.local_size,
            address=task.address, port=task.port, attempt=task.attempt, secret=env.get(_SECRET, ""), hosts=task.hosts,
        )  # fmt: skip


def launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher, or the pod of this host, has given this process a rank.

    Raises if a batch system started several processes and does not say how many.
    """
    return has_rank(env) or batch_task(env) is not None


def has_rank(env: Mapping[str, str]) -> bool:
    return "RANK" in env or "WORLD_SIZE" in env or len(_pod_hosts(env)) > 1


def without_place(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables of a rank or task."""
    place = {*Topology().to_env(), _LAUNCHED, _WATCHED, STORE, *batch.names()}
    return {name: value for name, value in env.items() if name not in place}


def _pod_hosts(env: Mapping[str, str]) -> list[str]:
    pod = tpu_pod(env)
    return pod.hosts if pod else []


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns `rank 3` or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise TopologyError(f"{other} is set but {name} is not: start the script with torchrun")
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
    """Returns the TPU pod that a process with this environment uses, or None for a single host.

    Kubernetes sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; on Cloud TPU VMs the metadata server has them.
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
    """Whether chips of this host were selected, as on a host outside a pod."""
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
