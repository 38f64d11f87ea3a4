"""All commands that are run for a pod, as data that a dry run prints, and the hosts that a config names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from lockstep.config.accelerators import Accelerator, check_slice
from lockstep.config.pod import Container, Pod
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.code import Code
from lockstep.launchers.ssh.folder import checked_name
from lockstep.launchers.ssh.gcloud import Gcloud, Transport, startup_script, wait_for_startup
from lockstep.launchers.ssh.record import Record, archive_of, plain, startup_of
from lockstep.launchers.ssh.ssh import Command, Ssh, require_ssh

# How long the start-up script of a host may take.
READY_SECONDS = 1200.0
_TPU = {"PJRT_DEVICE": "TPU"}
# What decides which devices a host has for a run; the rest of a config does not belong on a command line.
_ABOUT_DEVICES = ("runtime", "devices", "strategy", "xla")


class PodCommands:
    """The hosts of a config, under a name, and the commands for them."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self.name, self.config = checked_name(name), config
        self.code = Code.of(config)
        self.transport = _transport(name, config)

    @property
    def on_cloud(self) -> bool:
        return self.config.pod.type == "gcloud"

    def host_command(self, verb: str, **asked: Any) -> list[str]:
        """Returns the command that asks a host, in a container where the pod has one."""
        settings = self.config.pod
        question = {"directory": settings.directory, "pod": self.name, **asked}
        argv = [_without_home(settings.python), "-P", "-m", "lockstep.launchers.ssh.host", verb, json.dumps(question)]
        if settings.container is None:
            return argv
        return run_in_container(settings, argv, workdir="/", named=False)

    def asking(self, verb: str, worker: int | None = None, **asked: Any) -> list[Command]:
        """Asks one worker, or each of them by a command."""
        argv = self.host_command(verb, **asked)
        chosen = range(len(self.transport.workers)) if worker is None else [worker]
        return [command for each in chosen for command in self.transport.run(argv, each)]

    def inspecting(self, folder: str | None = None, make: bool = False, claim: str | None = None) -> list[Command]:
        about = {key: value for key, value in plain(self.config).items() if key in _ABOUT_DEVICES}
        claims: dict[str, Any] = {"claim": claim} if claim else {}
        network = self.config.launch.network
        return self.asking("inspect", config=about, network=network, folder=folder, make=make, **claims)

    def copying(self) -> list[Command]:
        there = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "push.tar")
        return self.transport.copy(archive_of(self.name), there)

    def starting(self, worker: int, job: str, path: str) -> list[list[Command]]:
        """Starts the agent of a job on a worker, in stages; `path` is the pod's folder there."""
        if self.config.pod.container is None:
            return [self.asking("start", worker, index=worker)]
        argv = [_without_home(self.config.pod.python), "-P", "-m", "lockstep.launchers.ssh.agent", f"{path}/jobs/{job}"]
        detached = run_in_container(self.config.pod, argv, workdir=f"{path}/code", detached=True)
        begun = self.asking("begun", worker, job=job)
        return [self.asking("prepare", worker, index=worker), self.transport.run(detached, worker), begun]

    def following(self, worker: int, offset: int = 0, job: str | None = None, follow: bool = True) -> list[Command]:
        return self.asking("follow", worker, offset=offset, job=job, follow=follow)

    def stopping(self, worker: int | None, job: str | None, at_once: bool = False) -> list[Command]:
        if self.config.pod.container is None:
            return self.asking("stop", worker, job=job, at_once=at_once)
        grace = 1.0 if at_once else self.config.timeouts.stop
        return self.transport.run(stop_container(self.config.pod, grace), worker)

    def creating(self) -> list[Command]:
        """Creates the hosts, and waits until they are ready."""
        commands = self.transport.create()
        if commands and self.on_cloud:
            archive_of(self.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            startup_of(self.name).write_text(startup_script(self.config.pod), encoding="utf-8")
            ready = wait_for_startup(READY_SECONDS)
            commands += [c for at in range(len(self.transport.workers)) for c in self.transport.run(ready, at)]
        return commands

    def deleting(self) -> list[Command]:
        """Deletes the hosts; where they stay, the pod's folder on them."""
        return self.transport.delete() or self.asking("delete")

    def pulling(self, record: Record) -> list[Command]:
        """Fetches the run's folder as an archive: all of the first host's, and the logs of the others."""
        return [
            replace(each, writes=archive_of(self.name).with_name(f"pull-{worker}.tar"))
            for worker in range(len(self.transport.workers))
            for each in self.asking("pack", worker, run=record.folder, everything=worker == 0)
        ]

    def worker(self, number: int) -> int:
        if number >= len(self.transport.workers):
            raise ConfigError(f"--worker {number}: pod {self.name} has workers 0 to {len(self.transport.workers) - 1}")
        return number


def _without_home(path: str) -> str:
    # Logins begin in the home folder, and nothing that is quoted is expanded there.
    return path.removeprefix("~/")


def _transport(name: str, config: RunConfig) -> Transport:
    if config.pod.type == "gcloud":
        check_accelerator(config)
        return Gcloud(name, config.pod, startup_of(name))
    require_ssh()
    return Ssh(host_names(config))


def host_names(config: RunConfig) -> list[str]:
    hosts = list(config.launch.hosts)
    if not hosts:
        raise ConfigError("launch: ssh needs hosts: name them in launch.hosts")
    twice = sorted({each for each in hosts if hosts.count(each) > 1})
    if twice:
        raise ConfigError(
            f"launch.hosts: {twice[0]} is listed twice: a host has one agent, and `processes` are spread evenly"
        )
    if config.processes != "auto" and int(config.processes) < len(hosts):
        raise ConfigError(
            f"processes: {config.processes} ranks cannot be spread over {len(hosts)} hosts, each needs one; processes "
            "counts all ranks of the run"
        )
    return hosts


def check_accelerator(settings: RunSettings) -> Accelerator:
    """Returns the accelerator of a Cloud TPU; raises ConfigError where the run could not use it."""
    if settings.pod.type != "gcloud":
        raise ConfigError("pod.type is ssh, but only a Cloud TPU (pod.type: gcloud) has an accelerator_type")
    found = settings.pod.accelerator
    try:
        check_slice(settings, found, "pod.accelerator_type")
    except ConfigError as error:
        raise ConfigError(f"{error}. Nothing was created") from None
    return found


def run_in_container(
    pod: Pod, argv: Sequence[str], *, workdir: str, detached: bool = False, named: bool = True
) -> list[str]:
    """Returns the command that runs another in a new container, which is removed with it.

    Without `named`, the container runs beside the one that has the pod's name.
    """
    container = _container(pod)
    values = {**_TPU, **container.env} if pod.type == "gcloud" else container.env
    return [
        *_docker(container), "run",
        *(["-d"] if detached else []),
        *([f"--name={container.name}"] if named else []), "--rm",
        *(["--privileged"] if container.privileged else []),
        "--net=host", "--ipc=host",
        *(part for name, value in values.items() for part in ("-e", f"{name}={value}")),
        *(part for mount in container.mounts for part in ("-v", mount)),
        "-w", workdir,
        container.image, *argv,
    ]  # fmt: skip


def stop_container(pod: Pod, grace: float) -> list[str]:
    """Returns the command that asks the container to save and leave (SIGTERM), and ends it after `grace` seconds."""
    container = _container(pod)
    # By its letter: newer versions of docker call the long form --timeout, older ones --time.
    return [*_docker(container), "stop", "-t", str(max(1, round(grace))), container.name]


def _container(pod: Pod) -> Container:
    assert pod.container is not None, "only a pod with a container has commands for one"
    return pod.container


def _docker(container: Container) -> list[str]:
    return ["sudo", "-n", "docker"] if container.sudo else ["docker"]  # never ask for a password
