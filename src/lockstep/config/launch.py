"""The `launch` section: which launcher starts the processes, and what Ray and SLURM need to know."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from lockstep.config.values import HostName, PathOrUrl, Seconds, Section

# Options of sbatch that Lockstep sets: by other keys, or always.
OURS = (
    "parsable", "wrap", "array", "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node",
    "partition", "account", "qos", "time", "signal", "requeue", "no-requeue", "output", "error", "open-mode", "chdir",
    "export", "export-file", "wait",
)  # fmt: skip


def _plain(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be text in one line, without control characters")
    return text


Text = Annotated[str, AfterValidator(_plain)]


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r} is no long option of sbatch; write it without dashes before it: mem, constraint")
    if name in OURS:
        raise ValueError(f"{name} is not for extra: Lockstep sets it, by another key of launch.slurm or always")
    return name


def _value(value: Any) -> str | int | bool:
    if isinstance(value, (bool, int)):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text, a whole number, or true for an option without a value")
    return _plain(value)


Option = Annotated[Any, AfterValidator(_value), WithJsonSchema({"type": ["string", "integer", "boolean"]})]


class Slurm(Section):
    """The job that `launch: slurm` submits. Values are passed to sbatch unchanged."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    nodes: int = Field(1, gt=0, le=1_000_000)
    tasks_per_node: int | None = Field(None, gt=0, le=65_536, description="defaults to processes / nodes")
    cpus_per_task: int | None = Field(None, gt=0, le=65_536)
    gpus_per_node: int | None = Field(None, gt=0, le=65_536)
    time: Text | None = Field(None, description="the time limit as sbatch takes it; defaults to the partition's")
    signal_before: Seconds = Field(
        120.0, le=65_535, description="request a save this long before the limit; at least timeouts.stop"
    )
    requeue: bool = Field(True, description="queue a run again after it was asked to save, and resume it")
    extra: dict[Annotated[str, AfterValidator(_option)], Option] = Field(
        {}, description="more options of sbatch by their long names; true for an option without a value"
    )


def _no_client(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(
            "Ray Client (ray://) cannot carry a training run; give the cluster's own address (HOST:6379) on a machine "
            "of the cluster, or submit the command with `ray job submit`"
        )
    return address


class RayCluster(Section):
    """Where Ray starts the workers, and the resources of each."""

    address: Annotated[str, AfterValidator(_no_client)] | None = Field(
        None, description="of a running cluster; defaults to RAY_ADDRESS, then to a new local cluster"
    )
    resources: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description="per worker: CPU (default 1), GPU, TPU, memory in bytes, or custom resources"
    )
    topology: str | None = Field(None, description="of the TPU slice that several workers share, such as 2x2x2")
    accelerator: str | None = Field(None, description="Ray's accelerator type, such as TPU-V4; both for TPUs only")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout: Seconds = Field(60.0, description="how long to wait for the resources of all workers")
    min_workers: int | None = Field(None, gt=0, description="train with this many if there is no room for all")
    runtime_env: dict[str, Any] = Field({}, description="Ray's runtime_env; the task's folder is always included")
    insecure: bool = Field(False, description="use a cluster without token authentication: see docs/security.md")
    storage: PathOrUrl | None = Field(
        None, description="a folder shared by all nodes, or a bucket, for run folders; defaults to --out"
    )


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ValueError(f"not a network; write for example 10.0.0.0/24 ({error})") from None
    return text


class Launch(Section):
    type: Literal["local", "ssh", "ray", "slurm"] = "local"
    hosts: tuple[HostName, ...] = Field(
        (), strict=False, description="ssh: the hosts, by their names in your SSH config; [user@]host"
    )
    network: Annotated[str, AfterValidator(_network)] | None = Field(
        None, description="ssh: the network between the hosts, such as 10.0.0.0/24; defaults to the login addresses"
    )
    max_restarts: int = Field(0, ge=0)
    port: int | None = Field(None, gt=0, lt=65536, description="defaults to a free port")
    threads: int | None = Field(
        None, gt=0, le=65_536, description="CPU threads per process; defaults to cores / processes"
    )
    share_devices: bool = Field(False, description="allow several processes on one physical device")
    ray: RayCluster = RayCluster()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _hosts_are_for_ssh(self) -> Launch:
        given = [name for name in ("hosts", "network") if getattr(self, name)]
        if given and self.type != "ssh":
            raise ValueError(f"{given[0]} is for launch: ssh, but launch.type is {self.type}")
        return self
