"""Which hosts a config names."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.accelerators import Accelerator, check_slice
from lockstep.config.accelerators import ranks_per_host as ranks_per_host
from lockstep.config.plain import read_text
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.config.values import host_name
from lockstep.errors import ConfigError


def named(config: RunConfig) -> list[str]:
    """Every host once, in order; a file has one per line, and comments."""
    launch = config.launch
    hosts, place = list(launch.hosts), "launch.hosts"
    if launch.hosts_file is not None:
        place = f"launch.hosts_file {launch.hosts_file}"
        hosts = _of_file(Path(launch.hosts_file).expanduser(), place)
    if not hosts:
        raise ConfigError("launch: ssh needs hosts: name them in launch.hosts, or in a file (launch.hosts_file)")
    twice = sorted({each for each in hosts if hosts.count(each) > 1})
    if twice:
        raise ConfigError(
            f"{place}: {twice[0]} is listed twice: a host has one agent, and `processes` are spread evenly"
        )
    if launch.nodes is not None and launch.nodes > len(hosts):
        raise ConfigError(f"launch.nodes: {launch.nodes} hosts are to train, but {place} has {len(hosts)}")
    nodes = launch.nodes or len(hosts)
    if config.processes != "auto" and int(config.processes) < nodes:
        raise ConfigError(
            f"processes: {config.processes} ranks cannot be spread over {nodes} hosts, each needs one; processes "
            "counts all ranks of the run"
        )
    return hosts


def _of_file(file: Path, place: str) -> list[str]:
    try:
        lines = read_text(file).splitlines()
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror or error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            hosts.append(host_name(text))
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {error}, got {text!r}") from None
    return hosts


def check(settings: RunSettings) -> Accelerator:
    """What the pod of a config is made of; raises where the run could not use it."""
    if settings.pod.type != "gcloud":
        raise ConfigError("pod.type is ssh, but only a Cloud TPU (pod.type: gcloud) has an accelerator_type")
    found = settings.pod.accelerator
    try:
        check_slice(settings, found, "pod.accelerator_type")
    except ConfigError as error:
        raise ConfigError(f"{error}. Nothing was created") from None
    return found
