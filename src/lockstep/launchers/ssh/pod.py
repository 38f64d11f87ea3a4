"""The operations on a pod (push, start, stop, pull, ...), carried out on all hosts or on none."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.accelerators import ranks_per_host
from lockstep.config.plain import columns
from lockstep.distributed.signals import handled, unless_ignored
from lockstep.distributed.store.wire import fresh
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import record as records
from lockstep.launchers.ssh.code import pack, unpack_run
from lockstep.launchers.ssh.commands import READY_SECONDS, PodCommands
from lockstep.launchers.ssh.gcloud import NEW_HOST_KEYS, Gcloud, Transport, next_step, require_gcloud
from lockstep.launchers.ssh.record import Host, Order, Record, archive_of, plain, spread
from lockstep.launchers.ssh.ssh import Done, answered, execute
from lockstep.mirror.url import Url
from lockstep.shown import in_a_line
from lockstep.terminal import tell
from lockstep.version import installed

# How long a host may take for what does not wait for training.
_ANSWER_SECONDS, _COPY_SECONDS, _START_SECONDS, _CREATE_SECONDS = 60.0, 600.0, 240.0, 1800.0
_LOOK_AGAIN_SECONDS = 10.0  # at a pod that is not ready
_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NotAll(LaunchError):
    """Some hosts cannot take part, so none does."""


class Pod(PodCommands):
    def inspect(self, folder: str | None = None, make: bool = False, claim: str | None = None) -> list[Inspection]:
        """Asks every host about itself; `folder` is that of a run to resume, `claim` the job that is about to start."""
        return judge(self.transport, execute(self.inspecting(folder, make, claim), _ANSWER_SECONDS))

    def push(self) -> int:
        """Copies code to every host; returns the number of files."""
        _require_all(self.inspect(make=True))
        files = self.pack()
        self._all_well(execute(self.copying(), _COPY_SECONDS))
        for done in execute(self.asking("push"), _START_SECONDS):
            answered(self.transport, done)
        return files

    def pack(self, order: str = "") -> int:
        return pack(archive_of(self.name), self.code.folder, order)

    def start(self, out: Path | Url, record: Record | None = None, check: Callable[[], None] = lambda: None) -> Record:
        """Copies code and an order to every host and starts the agents; with a record, its run is resumed.

        `check` is called once the hosts have answered, and raises where the config cannot be started.
        """
        # In UTC: the newest job is found by its name, also after the end of summer time.
        job = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        claimed = list(range(len(self.transport.workers)))
        try:
            found = self.inspect(record.folder if record is not None else None, make=True, claim=job)
            claimed = [each.index for each in found if not each.found.get("claimed")]
            self._require_claim(found)
            return self._start(job, out, record, found, check)
        except BaseException:
            execute([c for index in claimed for c in self.asking("release", index, job=job)], _ANSWER_SECONDS)
            raise

    def _require_claim(self, found: Sequence[Inspection]) -> None:
        """Of several commands that start the pod at once, only the first on the first host continues."""
        if found[0].found.get("claimed"):
            raise NotAll(
                f"pod {self.name} is being started by another command (job {found[0].found['claimed']} on "
                f"{found[0].name}), so nothing was started. Follow that one, or stop it first: lockstep pod stop "
                f"{self.name}. A command that was killed keeps others out for 15 minutes"
            )

    def _start(
        self, job: str, out: Path | Url, record: Record | None, found: list[Inspection], check: Callable[[], None]
    ) -> Record:
        _require_all(found)
        check()
        if record is not None and record.url is None and not found[0].found["saved"]:
            raise LaunchError(
                f"{record.folder}: {found[0].name} has no checkpoint of this run. Start anew, with --out on a path "
                "that all hosts share or in a bucket"
            )
        order = self._order(job, found, out, record)
        started = Record(name=self.name, config=plain(self.config), job=order.job, folder=order.folder, url=order.url)
        try:
            self.pack(order.model_dump_json())
            self._all_well(execute(self.copying(), _COPY_SECONDS))
            before = records.find(self.name)
            records.write(started)  # first: only who knows a job can stop it
            with handled(dict.fromkeys(unless_ignored(_INTERRUPTING), signal.default_int_handler)):
                try:
                    self._start_all(found, order)
                except BaseException as error:
                    tell(f"lockstep: ending what was begun of job {job}")
                    ended = execute([c for each in found for c in self.stopping(each.index, job)], _ANSWER_SECONDS)
                    if isinstance(error, NotAll) or not any(done.code for done in ended):
                        records.write(before) if before else records.forget(self.name)
                    raise
        finally:
            archive_of(self.name).unlink(missing_ok=True)  # the secret is in it
        return started

    def _start_all(self, found: Sequence[Inspection], order: Order) -> None:
        """Starts all agents; raises NotAll where one does not begin."""
        wrong: dict[str, str] = {}
        stages = [self.starting(each.index, order.job, each.found["path"]) for each in found]
        for stage in zip(*stages, strict=True):
            dones = execute([command for commands in stage for command in commands], _START_SECONDS)
            for each, done in zip(found, dones, strict=True):
                try:
                    if done.code or "lockstep.launchers.ssh.host" in " ".join(done.command.argv):
                        answered(self.transport, done)
                except LaunchError as error:
                    wrong.setdefault(each.name, str(error))
            if wrong:
                break
        if wrong:
            causes = [f"{name}: {why}" for name, why in wrong.items()]
            raise NotAll("\n".join([*causes, "nothing was started: what began on other hosts was ended"]))

    def _order(self, job: str, found: Sequence[Inspection], out: Path | Url, known: Record | None) -> Order:
        head = found[0].found
        folder = known.folder if known is not None else None
        if folder is None:
            shared = isinstance(out, Path) and out.is_absolute()
            where = PurePosixPath(str(out)) if shared else PurePosixPath(head["path"]) / "runs"
            folder = str(where / f"{self.config.name}-{job}")
        url = known.url if known is not None else None
        if isinstance(out, Url):
            url = str(out / PurePosixPath(folder).name)
        config = plain(self.config)
        config["task"]["type"] = self.code.task_there(head["path"])
        config["runtime"] = head["devices"]["runtime"]
        processes, devices = config["processes"], [each.found["devices"]["processes"] for each in found]
        if self.on_cloud:  # where processes are those of every host
            processes, devices = "auto", [ranks_per_host(self.config, self.config.pod.accelerator)] * len(found)
            config["processes"] = "auto"
        hosts = (
            Host(name=each.name, address=each.found["address"], first=first, count=count)
            for each, (first, count) in zip(found, spread(processes, devices), strict=True)
        )
        port = self.config.launch.port or head["port"]
        return Order(
            pod=self.name, job=job, index=0, hosts=tuple(hosts), port=port, secret=fresh(), config=config,
            folder=folder, url=url, env=self._env(),
        )  # fmt: skip

    def _env(self) -> dict[str, str]:
        missing = [name for name in self.config.pod.env if name not in os.environ]
        if missing:
            raise ConfigError(f"pod.env: {missing[0]} is to be passed on, but is not set here")
        return {name: os.environ[name] for name in self.config.pod.env}

    def _all_well(self, dones: Sequence[Done]) -> None:
        wrong = []
        for done in dones:
            if done.code:
                name = self.name if done.command.worker is None else self.transport.workers[done.command.worker]
                wrong.append(f"{name}: {self.transport.explain(done.command, done.code, done.errors)}")
        if wrong:
            raise NotAll("\n".join(wrong))

    def create(self) -> None:
        commands = self.creating()
        if commands:
            require_gcloud()
            self._all_well(execute(commands[:1], _CREATE_SECONDS))
            self._all_well(execute(commands[1:], READY_SECONDS + _ANSWER_SECONDS))
            tell(f"lockstep: {NEW_HOST_KEYS}")

    def make_ready(self) -> None:
        """Creates hosts of the cloud again that were preempted, and starts those that were stopped."""
        if not isinstance(self.transport, Gcloud):
            return
        require_gcloud()
        deadline = time.monotonic() + _CREATE_SECONDS
        while True:
            (done,) = execute(self.transport.describe(), _ANSWER_SECONDS)
            if done.code and "NOT_FOUND" in done.errors:
                return self.create()
            self._all_well([done])
            found, step = next_step(done.out)
            if step == "use":
                return None
            tell(f"lockstep: the pod {self.name} is {found}: {_STEPS[step]}")
            if step == "recreate":
                self._all_well(execute(self.transport.delete(), _CREATE_SECONDS))
                return self.create()
            if step == "start":
                self._all_well(execute(self.transport.start(), _CREATE_SECONDS))
            elif time.monotonic() > deadline:
                raise LaunchError(f"the pod {self.name} is still {found} after {_CREATE_SECONDS:g} s")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def delete(self) -> None:
        if gone := self.transport.delete():
            require_gcloud()
            self._all_well(execute(gone, _CREATE_SECONDS))
            return
        for done in execute(self.asking("delete"), _ANSWER_SECONDS):
            answered(self.transport, done)

    def states(self) -> list[str]:
        found = []
        for done in execute(self.asking("ps"), _ANSWER_SECONDS):
            try:
                state = _state(answered(self.transport, done))
            except LaunchError as error:
                state = str(error)
            found.append(f"{self.transport.workers[done.command.worker or 0]}: {state}")
        return found

    def look(self, record: Record) -> dict[str, Any]:
        (done,) = execute(self.asking("look", 0, run=record.folder), _ANSWER_SECONDS)
        return answered(self.transport, done)

    def stop(self, record: Record, at_once: bool = False) -> None:
        """Asks the head to save and leave; where it is out of reach, every host."""
        limit = _ANSWER_SECONDS + self.config.timeouts.stop  # a container is waited for
        (done,) = execute(self.stopping(0, record.job, at_once), limit)
        if done.code:
            why = self.transport.explain(done.command, done.code, done.errors)
            tell(f"lockstep: {self.transport.workers[0]}: {why}; the others are asked")
            execute(self.stopping(None, record.job, at_once), limit)

    def pull(self, record: Record, out: Path) -> list[Path]:
        """Copies the run's folder here: all of the head's, and the logs of the others."""
        if record.folder is None:
            raise ConfigError(f"pod {self.name}: no run was started there yet")
        name = PurePosixPath(record.folder).name
        unpacked = []
        archive_of(self.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for worker, command in enumerate(self.pulling(record)):
            assert command.writes is not None
            try:
                (done,) = execute([command], _ANSWER_SECONDS)
                answer = answered(self.transport, done)
                if answer["size"] is not None:
                    unpacked += unpack_run(command.writes, out, name, answer, everything=worker == 0)
            finally:
                command.writes.unlink(missing_ok=True)
        return unpacked


@dataclass(frozen=True)
class Inspection:
    """The answer of a host, and what is wrong with it."""

    index: int
    name: str
    found: dict[str, Any]
    problems: tuple[str, ...] = ()


def judge(transport: Transport, dones: Sequence[Done]) -> list[Inspection]:
    """Returns every host with what is wrong with it, by itself and compared with the first."""
    judged: list[Inspection] = []
    for done in dones:
        index = done.command.worker or 0
        name = transport.workers[index]
        try:
            found = answered(transport, done)
            judged.append(Inspection(index, name, found, tuple(_problems(found, judged, len(dones)))))
        except LaunchError as error:
            judged.append(Inspection(index, name, {}, (str(error),)))
    return judged


def _problems(found: dict[str, Any], before: Sequence[Inspection], hosts: int) -> Iterator[str]:
    others = [each for each in before if each.found]
    if found["lockstep"] != installed():
        yield f"it has Lockstep {found['lockstep']}, and this machine {installed()}: install the same"
    if found["torch"] is None:
        yield "torch is not installed for pod.python there"
    elif others and others[0].found["torch"] != found["torch"]:
        yield f"it has torch {found['torch']}, and {others[0].name} {others[0].found['torch']}: install the same"
    if not found["writable"]:
        yield f"{found['path']} cannot be written: name another pod.directory"
    elif others and others[0].found["path"] != found["path"]:
        yield f"its pod's folder is {found['path']}, and not {others[0].found['path']}: make pod.directory absolute"
    if not found["address"]:
        yield f"it has no address in launch.network; it has {', '.join(found['addresses'])}"
    elif hosts > 1 and found["address"].startswith("127."):
        yield "it has no IPv4 address that other hosts reach: hosts meet over IPv4"
    for other in others:
        if (found["host"], found["address"]) == (other.found["host"], other.found["address"]):
            yield f"is the same host as {other.name}: name every host once"
    if found["running"]:
        yield f"job {found['running']} is still at work there: `lockstep pod stop` has it save and leave"
    if "error" in found["devices"]:
        yield str(found["devices"]["error"])


def table(inspections: Sequence[Inspection]) -> str:
    rows: list[tuple[str, ...]] = [("host", "address", "torch", "devices", "verdict")]
    for each in inspections:
        devices = each.found.get("devices", {})
        there = f"{devices.get('processes', '-')} {devices.get('runtime', '')}".strip()
        cells = (str(each.found.get("address", "-")), str(each.found.get("torch", "-")), there)
        rows.append((each.name, *cells, "; ".join(each.problems) or "ok"))
    return "\n".join(map(in_a_line, columns(rows)))


def _require_all(inspections: Sequence[Inspection]) -> None:
    wrong = [each for each in inspections if each.problems]
    if wrong:
        raise NotAll(
            f"{len(wrong)} of {len(inspections)} hosts cannot take part, so nothing was started\n{table(inspections)}"
        )


def _state(answer: dict[str, Any]) -> str:
    if answer["job"] is None:
        return "no job yet"
    if answer["alive"]:
        return f"job {answer['job']} is at work, pid {answer['pid']}"
    if "exit_code" in answer:
        return f"job {answer['job']} has ended: {answer['status']}, exit code {answer['exit_code']}"
    return f"job {answer['job']} ended without a message"


_STEPS = {
    "wait": "waiting",
    "start": "starting it",
    "recreate": "it was taken away; deleting what is left of it, and creating it again",
}
