"""What a pod's verbs are made of: commands of its transport, as data, which a dry run prints."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers.ssh import hosts
from lockstep.launchers.ssh.digests import Code
from lockstep.launchers.ssh.folder import checked_name
from lockstep.launchers.ssh.record import Record, archive_of, plain, startup_of
from lockstep.launchers.ssh.ssh import Ssh, require_ssh
from lockstep.launchers.ssh.transport import Command, Transport

# How long the start-up script of a host may take.
READY_SECONDS = 1200.0
# What decides which devices a host has for a run; the rest of a config is nobody's business on a command line.
_ABOUT_DEVICES = ("runtime", "devices", "strategy", "xla")


class PodCommands:
    """The hosts of a config, under a name, and all that is ever run for them."""

    def __init__(self, name: str, config: RunConfig, transport: Transport | None = None) -> None:
        self.name, self.config = checked_name(name), config
        self.code = Code.of(config)
        self.transport = transport or _transport(name, config)

    @property
    def on_cloud(self) -> bool:
        return self.config.pod.type == "gcloud"

    def host_command(self, verb: str, **asked: Any) -> list[str]:
        """What asks a host: our own program there, in a container where the pod has one."""
        settings = self.config.pod
        question = {"directory": settings.directory, "pod": self.name, **asked}
        argv = [_without_home(settings.python), "-P", "-m", "lockstep.launchers.ssh.host", verb, json.dumps(question)]
        if settings.container is None:
            return argv
        from lockstep.launchers.ssh import container

        return container.run(settings, argv, workdir="/", named=False)

    def asking(self, verb: str, worker: int | None = None, **asked: Any) -> list[Command]:
        """The same question to one worker or to each of them: whose answer it is has to be known."""
        argv = self.host_command(verb, **asked)
        chosen = range(len(self.transport.workers)) if worker is None else [worker]
        return [command for each in chosen for command in self.transport.run(argv, each)]

    def inspecting(
        self, folder: str | None = None, make: bool = False, devices: bool = True, claim: str | None = None
    ) -> list[Command]:
        about = {**self.about(folder, make, devices), **({"claim": claim} if claim else {})}
        return self.asking("inspect", **about)

    def about(self, folder: str | None = None, make: bool = False, devices: bool = True) -> dict[str, Any]:
        """What an inspection is about."""
        about = {key: value for key, value in plain(self.config).items() if key in _ABOUT_DEVICES}
        network = self.config.launch.network
        return {"config": about if devices else None, "network": network, "folder": folder, "make": make}

    def copying(self, worker: int | None = None, file: Path | None = None) -> list[Command]:
        there = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "push.tar")
        return self.transport.copy(file or archive_of(self.name), there, worker)

    def pushing(self) -> list[Command]:
        return self.asking("push")

    def starting(self, worker: int, job: str, path: str) -> list[list[Command]]:
        """What starts the agent of a job on a worker, one after the other; `path` is the pod's folder there."""
        if self.config.pod.container is None:
            return [self.asking("start", worker)]
        from lockstep.launchers.ssh import container

        argv = [_without_home(self.config.pod.python), "-P", "-m", "lockstep.launchers.ssh.agent", f"{path}/jobs/{job}"]
        detached = container.run(self.config.pod, argv, workdir=f"{path}/code", detached=True)
        begun = self.asking("begun", worker, job=job)
        return [self.asking("prepare", worker), self.transport.run(detached, worker), begun]

    def following(self, worker: int, offset: int = 0, job: str | None = None, follow: bool = True) -> list[Command]:
        return self.asking("follow", worker, offset=offset, job=job, follow=follow)

    def stopping(self, worker: int | None, job: str | None, at_once: bool = False) -> list[Command]:
        if self.config.pod.container is None:
            return self.asking("stop", worker, job=job, at_once=at_once)
        from lockstep.launchers.ssh import container

        grace = 1.0 if at_once else self.config.timeouts.stop
        return self.transport.run(container.stop(self.config.pod, grace), worker)

    def archive(self, worker: int) -> Path:
        """Where what one host lacks is packed."""
        return archive_of(self.name).with_name(f"push-{worker}.tar")

    def creating(self) -> list[Command]:
        """What makes the hosts, and waits until they are ready for use."""
        commands = self.transport.create()
        if commands and self.on_cloud:
            from lockstep.launchers.ssh import startup

            archive_of(self.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            startup_of(self.name).write_text(startup.script(self.config.pod), encoding="utf-8")
            ready = startup.wait(READY_SECONDS)
            commands += [c for at in range(len(self.transport.workers)) for c in self.transport.run(ready, at)]
        return commands

    def deleting(self) -> list[Command]:
        """What gives the hosts back; where they stay, what removes all that is there of this pod."""
        return self.transport.delete() or self.asking("delete")

    def pulling(self, record: Record) -> list[Command]:
        """What would be run on every worker; where the file lies there, its answer tells."""
        packed = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "pull.tar")
        commands = self.asking("pack", run=record.folder)
        for worker in range(len(self.transport.workers)):
            commands += self.transport.fetch(packed, archive_of(self.name).with_name(f"pull-{worker}.tar"), worker)
        return commands

    @property
    def nodes(self) -> int:
        return self.config.launch.nodes or len(self.transport.workers)

    def worker(self, number: int) -> int:
        if number >= len(self.transport.workers):
            raise ConfigError(f"--worker {number}: pod {self.name} has workers 0 to {len(self.transport.workers) - 1}")
        return number

    def head(self, record: Record) -> int:
        workers = self.transport.workers
        return workers.index(record.head) if record.head in workers else 0


def _without_home(path: str) -> str:
    """Logins begin in the home folder, and nothing that is quoted is expanded there."""
    return path.removeprefix("~/")


def _transport(name: str, config: RunConfig) -> Transport:
    if config.pod.type == "gcloud":
        from lockstep.launchers.ssh.gcloud import Gcloud

        hosts.check(config)
        return Gcloud(name, config.pod, startup_of(name))
    require_ssh()
    return Ssh(hosts.named(config))
