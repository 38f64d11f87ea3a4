"""The `launch` section: which launcher starts the processes, and what Ray and SLURM need to know."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from lockstep.config.values import HostName, Seconds, Section, seconds_of

UNLIMITED = "UNLIMITED"
_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
# Options of sbatch that Lockstep sets, with the setting or the reason.
OURS = {
    "parsable": "the job's number is read from what sbatch prints",
    "wrap": "the script is Lockstep's",
    "array": "a sweep makes one",
    "job-name": "set name",
    "nodes": "set launch.slurm.nodes",
    "ntasks": "set processes",
    "ntasks-per-node": "set launch.slurm.tasks_per_node",
    "cpus-per-task": "set launch.slurm.cpus_per_task",
    "gpus-per-node": "set launch.slurm.gpus_per_node",
    "partition": "set launch.slurm.partition",
    "account": "set launch.slurm.account",
    "qos": "set launch.slurm.qos",
    "time": "set launch.slurm.time",
    "signal": "set launch.slurm.signal_before",
    "requeue": "set launch.slurm.requeue",
    "no-requeue": "set launch.slurm.requeue",
    "output": "it is in the run's folder",
    "error": "it is in the run's folder",
    "open-mode": "a requeued job appends to its output",
    "chdir": "it is the current folder",
    "export": "the job's environment carries the run's secret",
    "export-file": "the job's environment carries the run's secret",
    "wait": "the command does not wait for the job",
}

_LIMIT = (
    'not a time limit of SLURM; write hours:minutes:seconds ("12:00:00"), minutes:seconds ("90:00"), days-hours '
    '("2-12", "2-12:30:00"), "90 minutes", "12 hours" or UNLIMITED'
)


def _plain(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be text in one line, without control characters")
    return text


Text = Annotated[str, AfterValidator(_plain)]


def limit_in_seconds(text: str) -> float | None:
    """Returns the seconds of a SLURM time limit, or None for no limit. Raises ValueError."""
    if text.upper() in (UNLIMITED, "INFINITE"):
        return None
    clock = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,5}))?(?::(\d{1,5}))?", text)
    if clock is None or not ("-" in text or ":" in text):
        seconds = seconds_of(text) if clock is None else None
        if seconds is None:
            raise ValueError(_LIMIT)
        return seconds
    days, first, second, third = (int(each) if each else 0 for each in clock.groups())
    if clock[1] is not None:
        return float(days * _DAY + first * _HOUR + second * _MINUTE + third)
    if clock[4] is not None:
        return float(first * _HOUR + second * _MINUTE + third)
    return float(first * _MINUTE + second)


def _limit(text: Any) -> str:
    """A bare number is minutes to SLURM and seconds in the rest of a config, so it is refused."""
    if not isinstance(text, str):
        raise ValueError(_LIMIT)
    seconds = limit_in_seconds(text)
    if seconds is None:
        return UNLIMITED
    if seconds < _MINUTE:
        raise ValueError("must be one minute at least: SLURM counts in minutes")
    if ":" in text or "-" in text:
        return text
    hours, rest = divmod(int(seconds), _HOUR)
    return f"{hours}:{rest // _MINUTE:02d}:{rest % _MINUTE:02d}"


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r} is no long option of sbatch; write it without dashes before it: mem, constraint")
    if name in OURS:
        raise ValueError(f"{name} is not for extra: {OURS[name]}")
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
    time: Annotated[str, BeforeValidator(_limit)] | None = Field(
        None, description="the time limit as SLURM writes it; defaults to the partition's"
    )
    signal_before: Seconds = Field(
        120.0, le=65_535, description="request a save this long before the limit; at least timeouts.stop"
    )
    requeue: bool = Field(True, description="queue a run again after it was asked to save, and resume it")
    extra: dict[Annotated[str, AfterValidator(_option)], Option] = Field(
        {}, description="more options of sbatch by their long names; true for an option without a value"
    )

    @model_validator(mode="after")
    def _time_to_save(self) -> Slurm:
        limit = limit_in_seconds(self.time) if self.time is not None else None
        if limit is not None and limit <= self.signal_before:
            raise ValueError(
                f"the time limit {self.time} is {limit:g} s, and signal_before is {self.signal_before:g} s: the run "
                "would be asked to save as soon as it starts"
            )
        return self


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
    storage: str | None = Field(
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
    hosts_file: str | None = Field(None, min_length=1, description="ssh: a file with one host per line")
    nodes: int | None = Field(
        None, gt=0, description="ssh: train on this many of the hosts; the others are spares for a host that fails"
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
        given = [name for name in ("hosts", "hosts_file", "nodes", "network") if getattr(self, name)]
        if given and self.type != "ssh":
            raise ValueError(f"{given[0]} is for launch: ssh, but launch.type is {self.type}")
        if self.hosts and self.hosts_file:
            raise ValueError("give hosts or hosts_file, not both")
        return self
