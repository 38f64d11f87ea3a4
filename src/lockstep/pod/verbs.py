"""What can be done with a pod: every verb is made of commands for its transport, which a dry run prints instead."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.distributed.store.secret import fresh
from lockstep.errors import ConfigError, LaunchError
from lockstep.mirror.url import Url
from lockstep.pod import archive, hosts, preflight
from lockstep.pod.execute import Done, execute
from lockstep.pod.folder import checked_name
from lockstep.pod.order import Host, Order
from lockstep.pod.preflight import Inspection, answered
from lockstep.pod.record import Record, archive_of, plain
from lockstep.pod.ssh import Ssh, require_ssh
from lockstep.pod.transport import Command, Transport
from lockstep.terminal import tell

# How long a host may take for what does not wait for training.
_ANSWER_SECONDS, _COPY_SECONDS, _START_SECONDS, _CREATE_SECONDS = 60.0, 600.0, 120.0, 1800.0
_FOLLOW_SECONDS = 365 * 24 * 3600.0


class NotAll(LaunchError):
    """Some hosts cannot take part, so none does."""


@dataclass(frozen=True)
class Code:
    """The files that travel, and how the task is called on the hosts."""

    folder: Path | None
    task: str

    @classmethod
    def of(cls, config: RunConfig) -> Code:
        module, _, name = config.task.type.rpartition(":")
        if not module.endswith(".py"):
            return cls(None, config.task.type)  # a module that is installed on the hosts too
        return cls(Path(module).parent, f"{Path(module).name}:{name}")

    def digests(self) -> dict[str, str]:
        return archive.digests(self.folder) if self.folder is not None else {}

    def task_there(self, path: str) -> str:
        return self.task if self.folder is None else str(PurePosixPath(path) / "code" / self.task)


class Pod:
    """The hosts of a config, under a name."""

    def __init__(self, name: str, config: RunConfig, transport: Transport | None = None) -> None:
        self.name, self.config = checked_name(name), config
        self.code = Code.of(config)
        self.transport = transport or _transport(name, config)

    def host_command(self, verb: str, **asked: Any) -> list[str]:
        """What asks a host: our own program there."""
        settings = self.config.pod
        question = {"directory": settings.directory, "pod": self.name, **asked}
        return [_without_home(settings.python), "-P", "-m", "lockstep.pod.host", verb, json.dumps(question)]

    # Commands, as data.

    def inspecting(self, folder: str | None = None) -> list[Command]:
        config = {key: value for key, value in plain(self.config).items() if value is not None}
        return self.transport.run(
            self.host_command("inspect", config=config, network=self.config.launch.network, folder=folder)
        )

    def copying(self, worker: int | None = None) -> list[Command]:
        there = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "push.tar")
        return self.transport.copy(archive_of(self.name), there, worker)

    def pushing(self) -> list[Command]:
        return self.transport.run(self.host_command("push"))

    def starting(self, worker: int | None = None) -> list[Command]:
        return self.transport.run(self.host_command("start"), worker)

    def following(self, worker: int, offset: int = 0, job: str | None = None, follow: bool = True) -> list[Command]:
        return self.transport.run(self.host_command("follow", offset=offset, job=job, follow=follow), worker)

    def asking(self, verb: str, worker: int | None = None, **asked: Any) -> list[Command]:
        return self.transport.run(self.host_command(verb, **asked), worker)

    # What is done.

    def inspect(self, folder: str | None = None) -> list[Inspection]:
        began = time.time()
        dones = execute(self.inspecting(folder), _ANSWER_SECONDS)
        return preflight.judge(self.transport, dones, began, time.time())

    def push(self) -> tuple[int, int]:
        """Bring code to every host; how many files there are, and how many of them travelled to some host."""
        wanted = self.code.digests()
        inspections = self._reachable(self.inspect())
        lacking = [each for each in inspections if each.found["code"] != wanted]
        if not lacking:
            return len(wanted), 0
        changed = archive.write(archive_of(self.name), self.code.folder, wanted, _common(lacking))
        copied = [each for worker in lacking for each in execute(self.copying(worker.index), _COPY_SECONDS)]
        self._all_well(copied)
        self._all_well(execute(self.asking_some("push", lacking), _START_SECONDS))
        return len(wanted), len(changed)

    def asking_some(self, verb: str, inspections: Sequence[Inspection]) -> list[Command]:
        return [command for each in inspections for command in self.asking(verb, each.index)]

    def start(self, out: Path | Url, record: Record | None = None) -> Record:
        """Bring code and an order to every host and start their agents; with a record, the run in it goes on."""
        folder = record.folder if record is not None else None
        found = self._reachable(self.inspect(folder), needed=self.nodes)
        if record is not None:
            found = _newest_first(found, record)
        self._tell_missing(found)
        order = self._order(found, self._folder(found[0], out, folder), record.url if record is not None else None, out)
        wanted = self.code.digests()
        archives = []
        for index, each in enumerate(found):
            own = order.model_copy(update={"index": index})
            file = archive_of(self.name).with_name(f"push-{each.index}.tar")
            archive.write(file, self.code.folder, wanted, each.found["code"], own.model_dump_json())
            archives.append(file)
        there = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "push.tar")
        copies = [c for each, file in zip(found, archives, strict=True)
                  for c in self.transport.copy(file, there, each.index)]  # fmt: skip
        try:
            self._all_well(execute(copies, _COPY_SECONDS))
            self._start_all(found, order)
        finally:
            for file in archives:  # the secret is in it
                file.unlink(missing_ok=True)
        return Record(
            name=self.name,
            config=plain(self.config),
            code=str(self.code.folder) if self.code.folder is not None else None,
            job=order.job,
            folder=order.folder,
            url=order.url,
            head=found[0].name,
        )

    @property
    def nodes(self) -> int:
        return self.config.launch.nodes or len(self.transport.workers)

    def _start_all(self, found: Sequence[Inspection], order: Order) -> None:
        """All agents, or none: where one does not begin, the others are ended."""
        dones = execute([command for each in found for command in self.starting(each.index)], _START_SECONDS)
        wrong = []
        for each, done in zip(found, dones, strict=True):
            try:
                answered(self.transport, done)
            except LaunchError as error:
                wrong.append(f"{each.name}: {error}")
        if wrong:
            stops = [c for each in found for c in self.asking("stop", each.index, job=order.job)]
            execute(stops, _ANSWER_SECONDS)
            raise NotAll("\n".join([*wrong, "nothing was started: what began on other hosts was ended"]))

    def _order(self, found: Sequence[Inspection], folder: str, url: str | None, out: Path | Url) -> Order:
        head = found[0].found
        if isinstance(out, Url):
            url = str(out / PurePosixPath(folder).name)
        config = plain(self.config)
        config["task"]["type"] = self.code.task_there(head["path"])
        config["runtime"] = head["devices"]["runtime"]
        return Order(
            pod=self.name,
            job=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
            index=0,
            hosts=tuple(
                Host(name=each.name, address=each.found["address"], processes=each.found["devices"]["processes"])
                for each in found
            ),
            nodes=min(self.nodes, len(found)),
            port=self.config.launch.port or head["port"],
            secret=fresh(),
            config=config,
            folder=folder,
            url=url,
            env=self._env(),
        )

    def _env(self) -> dict[str, str]:
        """Variables that were named; a name that is not set here is a mistake."""
        missing = [name for name in self.config.pod.env if name not in os.environ]
        if missing:
            raise ConfigError(f"pod.env: {missing[0]} is to be passed on, but is not set here")
        return {name: os.environ[name] for name in self.config.pod.env}

    def _folder(self, head: Inspection, out: Path | Url, known: str | None) -> str:
        """Below the pod's own, unless a path was named that the hosts share."""
        if known is not None:
            return known
        stamp = time.strftime("%Y%m%d-%H%M%S")
        shared = isinstance(out, Path) and out.is_absolute()
        where = PurePosixPath(str(out)) if shared else PurePosixPath(head.found["path"]) / "runs"
        return str(where / f"{self.config.name}-{stamp}")

    def _reachable(self, inspections: list[Inspection], needed: int | None = None) -> list[Inspection]:
        """All of them, or those that are needed: everybody else is a spare, which is missed but not waited for."""
        wrong = [each for each in inspections if each.problems]
        good = [each for each in inspections if not each.problems]
        must = inspections[: needed if needed is not None else len(inspections)]
        if any(each.problems for each in must):
            raise NotAll(
                f"{len(wrong)} of {len(inspections)} hosts cannot take part, so nothing was started\n"
                + preflight.table(inspections)
            )
        return good

    def _tell_missing(self, found: Sequence[Inspection]) -> None:
        missing = [name for index, name in enumerate(self.transport.workers) if index not in {e.index for e in found}]
        if missing:
            tell(f"lockstep: {', '.join(missing)} cannot take part, and will not be there as a spare")

    def _all_well(self, dones: Sequence[Done]) -> None:
        wrong = [
            f"{self.transport.workers[done.command.worker or 0]}: "
            f"{self.transport.explain(done.command, done.code, done.errors)}"
            for done in dones
            if done.code != 0
        ]
        if wrong:
            raise NotAll("\n".join(wrong))

    def create(self) -> None:
        """Make the hosts, where they are to be made."""
        for command in self.transport.create():
            (done,) = execute([command], _CREATE_SECONDS)
            self._all_well([done])

    def delete(self) -> None:
        """Give the hosts back; where they stay, remove what is there of this pod."""
        gone = self.transport.delete()
        if not gone:
            for done in execute(self.asking("delete"), _ANSWER_SECONDS):
                answered(self.transport, done)
        self._all_well(execute(gone, _CREATE_SECONDS))

    def pack_all(self) -> None:
        """All code, as for a host that has nothing yet."""
        archive.write(archive_of(self.name), self.code.folder, self.code.digests(), {})

    def states(self) -> list[str]:
        """A line for every worker."""
        lines = []
        for done in execute(self.asking("ps"), _ANSWER_SECONDS):
            name = self.transport.workers[done.command.worker or 0]
            try:
                lines.append(f"{name}: {_state(answered(self.transport, done))}")
            except LaunchError as error:
                lines.append(f"{name}: {error}")
        return lines

    def console(self, worker: int, job: str | None, follow: bool) -> list[str]:
        (done,) = execute(self.following(worker, 0, job, follow), _FOLLOW_SECONDS)
        if done.code == 255:
            raise LaunchError(
                f"{self.transport.workers[worker]}: {self.transport.explain(done.command, 255, done.errors)}"
            )
        return done.out.splitlines()

    def pulling(self, record: Record) -> list[Command]:
        """What would be run on every worker; where the file lies there, its answer tells."""
        packed = str(PurePosixPath(_without_home(self.config.pod.directory)) / self.name / "pull.tar")
        commands = self.asking("pack", run=record.folder)
        for worker in range(len(self.transport.workers)):
            commands += self.transport.fetch(packed, archive_of(self.name).with_name(f"pull-{worker}.tar"), worker)
        return commands

    def worker(self, number: int) -> int:
        if number >= len(self.transport.workers):
            raise ConfigError(f"--worker {number}: pod {self.name} has workers 0 to {len(self.transport.workers) - 1}")
        return number

    def stop(self, record: Record, at_once: bool = False) -> None:
        """Ask the head to save and leave; where it is out of reach, every host."""
        head = self.head(record)
        (done,) = execute(self.asking("stop", head, job=record.job, at_once=at_once), _ANSWER_SECONDS)
        try:
            answered(self.transport, done)
        except LaunchError as error:
            tell(f"lockstep: {self.transport.workers[head]}: {error}; the others are asked")
            execute(self.asking("stop", job=record.job, at_once=at_once), _ANSWER_SECONDS)

    def head(self, record: Record) -> int:
        workers = self.transport.workers
        return workers.index(record.head) if record.head in workers else 0

    def pull(self, record: Record, out: Path) -> list[Path]:
        """Bring the run's folder here: all of the head's, and the logs of the others."""
        if record.folder is None:
            raise ConfigError(f"pod {self.name}: no run was started there yet")
        name = PurePosixPath(record.folder).name
        head, brought = self.head(record), []
        order = [head, *(each for each in range(len(self.transport.workers)) if each != head)]
        for worker in order:
            (done,) = execute(self.asking("pack", worker, run=record.folder), _COPY_SECONDS)
            file = answered(self.transport, done)["file"]
            if file is None:
                continue
            local = archive_of(self.name).with_name(f"pull-{worker}.tar")
            local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._all_well(execute(self.transport.fetch(file, local, worker), _COPY_SECONDS))
                brought += _extract(local, out, name, everything=worker == head)
            finally:
                local.unlink(missing_ok=True)
        return brought


def _extract(packed: Path, out: Path, name: str, everything: bool) -> list[Path]:
    """Files of a run's folder, below `out` and nowhere else; of a host that does not lead, its logs and profiles."""
    brought = []
    with tarfile.open(packed, mode="r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts or path.parts[:1] != (name,):
                continue
            if not everything and path.parts[1:2] not in (("logs",), ("profile",)):
                continue
            content = tar.extractfile(member)
            place = out / path
            if content is None or (not everything and place.exists()):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                shutil.copyfileobj(content, file)
            brought.append(place)
    return brought


def _common(inspections: Sequence[Inspection]) -> dict[str, str]:
    """What all of these hosts have alike: it need not travel."""
    first, *rest = (each.found["code"] for each in inspections)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in rest)}


def _newest_first(found: list[Inspection], record: Record) -> list[Inspection]:
    """The host that has the newest checkpoint leads: the folder of a run may be on its disk alone."""
    steps = {each.index: each.found["newest_step"] for each in found}
    if all(step is None for step in steps.values()):
        if record.url is not None:
            return found  # whoever leads fetches it
        raise LaunchError(
            f"{record.folder}: no host that is reached has a checkpoint of this run; it was led by {record.head}, "
            "whose disk may be the only one that has it. Start anew, with --out on a path that all hosts share or in a "
            "bucket"
        )
    newest = max(step for step in steps.values() if step is not None)
    leads = next((each for each in found if each.name == record.head and steps[each.index] == newest),
                 next(each for each in found if steps[each.index] == newest))  # fmt: skip
    return [leads, *(each for each in found if each is not leads)]


def _state(answer: dict[str, Any]) -> str:
    if answer["job"] is None:
        return "no job yet"
    if answer["pid"] is not None:
        return f"job {answer['job']} is at work, pid {answer['pid']}"
    if "exit_code" in answer:
        return f"job {answer['job']} has ended: {answer['status']}, exit code {answer['exit_code']}"
    return f"job {answer['job']} is gone, and did not say why"


def _without_home(path: str) -> str:
    """Logins begin in the home folder, and nothing that is quoted is expanded there."""
    return path.removeprefix("~/")


def _transport(name: str, config: RunConfig) -> Transport:
    require_ssh()
    return Ssh(hosts.named(config))
