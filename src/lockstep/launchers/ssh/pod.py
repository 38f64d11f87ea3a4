"""The operations on a pod (push, start, stop, pull, ...), carried out on all hosts or on none."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.accelerators import ranks_per_host
from lockstep.distributed.store.wire import fresh
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import preflight
from lockstep.launchers.ssh.code import pack, unpack_run
from lockstep.launchers.ssh.commands import READY_SECONDS, PodCommands
from lockstep.launchers.ssh.gcloud import NEW_HOST_KEYS, Gcloud, next_step, require_gcloud, state
from lockstep.launchers.ssh.preflight import Inspection, answered
from lockstep.launchers.ssh.record import Host, Order, Record, archive_of, plain
from lockstep.launchers.ssh.ssh import Done, execute
from lockstep.launchers.ssh.transport import CONSOLE, decoded
from lockstep.mirror.url import Url
from lockstep.terminal import tell

# How long a host may take for what does not wait for training.
_ANSWER_SECONDS, _COPY_SECONDS, _START_SECONDS, _CREATE_SECONDS = 60.0, 600.0, 240.0, 1800.0
_FOLLOW_SECONDS = 20 * 24 * 3600.0  # a wait of more than 24 days is none that the system takes
_LOOK_AGAIN_SECONDS = 10.0  # at a pod that is not ready


class NotAll(LaunchError):
    """Some hosts cannot take part, so none does."""


class Pod(PodCommands):
    def inspect(
        self, folder: str | None = None, make: bool = False, devices: bool = True, claim: str | None = None
    ) -> list[Inspection]:
        """Asks every host about itself; `claim` is the job that is about to start."""
        began = time.time()
        dones = execute(self.inspecting(folder, make, devices, claim), _ANSWER_SECONDS)
        return preflight.judge(self.transport, dones, began, time.time())

    def push(self) -> tuple[int, int]:
        """Copies code to every host; returns how many files there are, and how many travelled to some host."""
        with ThreadPoolExecutor(1) as meanwhile:
            digesting = meanwhile.submit(self.code.digests)
            inspections = self._reachable(self.inspect(make=True, devices=False))
            wanted = digesting.result()
        lacking = [each for each in inspections if each.found["code"] != wanted]
        if not lacking:
            return len(wanted), 0
        changed = pack(archive_of(self.name), self.code.folder, wanted, _common(lacking))
        self._all_well(execute([c for each in lacking for c in self.copying(each.index)], _COPY_SECONDS))
        self._all_well(execute([c for each in lacking for c in self.asking("push", each.index)], _START_SECONDS))
        return len(wanted), len(changed)

    def start(self, out: Path | Url, record: Record | None = None, check: Callable[[], None] = lambda: None) -> Record:
        """Copies code and an order to every host and starts the agents; with a record, its run is resumed.

        `check` is called once the hosts have answered, and raises where the config cannot be started.
        """
        job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = record.folder if record is not None else None
        claimed = list(range(len(self.transport.workers)))
        try:
            inspections = self.inspect(folder, make=True, claim=job)
            claimed = [each.index for each in inspections if each.reached and not each.found.get("claimed")]
            self._require_claim(inspections)
            return self._start(job, out, record, inspections, check)
        except BaseException:
            execute([c for index in claimed for c in self.asking("release", index, job=job)], _ANSWER_SECONDS)
            raise

    def _start(
        self,
        job: str,
        out: Path | Url,
        record: Record | None,
        inspections: list[Inspection],
        check: Callable[[], None],
    ) -> Record:
        folder = record.folder if record is not None else None
        if record is None:
            found = self._reachable(inspections, needed=self.nodes)
        else:  # a host that has gone since then is what spares are for
            found = _newest_first(self._enough(inspections), record)
        self._tell_missing(found)
        check()
        url = record.url if record is not None else None
        order = self._order(job, found, self._folder(found[0], out, folder), url, out)
        wanted = self.code.digests()
        archives = []
        for index, each in enumerate(found):
            own = order.model_copy(update={"index": index})
            file = self.archive(each.index)
            pack(file, self.code.folder, wanted, each.found["code"], own.model_dump_json())
            archives.append(file)
        copies = [c for each, file in zip(found, archives, strict=True) for c in self.copying(each.index, file)]
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

    def _start_all(self, found: Sequence[Inspection], order: Order) -> None:
        """Starts all agents, or none: where one does not begin, the others are ended."""
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
            execute([c for each in found for c in self.stopping(each.index, order.job)], _ANSWER_SECONDS)
            causes = [f"{name}: {why}" for name, why in wrong.items()]
            raise NotAll("\n".join([*causes, "nothing was started: what began on other hosts was ended"]))

    def _require_claim(self, inspections: Sequence[Inspection]) -> None:
        """Of several commands that start the pod at once, only the first on the first good host continues."""
        first = next((each for each in inspections if not each.problems), None)
        if first is not None and first.found.get("claimed"):
            raise NotAll(
                f"pod {self.name} is being started by another command (job {first.found['claimed']} on {first.name}), "
                "so nothing was started. Follow that one, or stop it first: lockstep pod stop "
                f"{self.name}. A command that was killed keeps others out for 15 minutes"
            )

    def _order(self, job: str, found: Sequence[Inspection], folder: str, url: str | None, out: Path | Url) -> Order:
        head = found[0].found
        if isinstance(out, Url):
            url = str(out / PurePosixPath(folder).name)
        config = plain(self.config)
        config["task"]["type"] = self.code.task_there(head["path"])
        config["runtime"] = head["devices"]["runtime"]
        per_host = {each.index: each.found["devices"]["processes"] for each in found}
        if self.on_cloud:  # where processes are those of every host
            per_host = dict.fromkeys(per_host, ranks_per_host(self.config, self.config.pod.accelerator))
            config["processes"] = "auto"
        return Order(
            pod=self.name,
            job=job,
            index=0,
            hosts=tuple(
                Host(name=each.name, address=each.found["address"], processes=per_host[each.index]) for each in found
            ),
            nodes=min(self.nodes, len(found)),
            port=self.config.launch.port or head["port"],
            secret=fresh(),
            config=config,
            folder=folder,
            shared=url is None and not folder.startswith(f"{head['path']}/"),
            url=url,
            env=self._env(),
        )

    def _env(self) -> dict[str, str]:
        missing = [name for name in self.config.pod.env if name not in os.environ]
        if missing:
            raise ConfigError(f"pod.env: {missing[0]} is to be passed on, but is not set here")
        return {name: os.environ[name] for name in self.config.pod.env}

    def _folder(self, head: Inspection, out: Path | Url, known: str | None) -> str:
        if known is not None:
            return known
        stamp = time.strftime("%Y%m%d-%H%M%S")
        shared = isinstance(out, Path) and out.is_absolute()
        where = PurePosixPath(str(out)) if shared else PurePosixPath(head.found["path"]) / "runs"
        return str(where / f"{self.config.name}-{stamp}")

    def _reachable(self, inspections: list[Inspection], needed: int | None = None) -> list[Inspection]:
        """Returns the hosts without problems; raises where one of those that are needed has any."""
        wrong = [each for each in inspections if each.problems]
        good = [each for each in inspections if not each.problems]
        must = inspections[: needed if needed is not None else len(inspections)]
        if any(each.problems for each in must):
            raise NotAll(
                f"{len(wrong)} of {len(inspections)} hosts cannot take part, so nothing was started\n"
                + preflight.table(inspections)
            )
        return good

    def _enough(self, inspections: list[Inspection]) -> list[Inspection]:
        good = [each for each in inspections if not each.problems]
        return good if len(good) >= self.nodes else self._reachable(inspections)

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
            found = state(done.out)
            step = next_step(found)
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

    def pack_all(self) -> None:
        """Packs all code, as for a host that has none yet."""
        pack(archive_of(self.name), self.code.folder, self.code.digests(), {})

    def states(self) -> list[str]:
        return [f"{each['worker']}: {each['error'] or _state(each)}" for each in self.answers()]

    def answers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for done in execute(self.asking("ps"), _ANSWER_SECONDS):
            name = self.transport.workers[done.command.worker or 0]
            try:
                found.append({"worker": name, "error": None, **answered(self.transport, done)})
            except LaunchError as error:
                found.append({"worker": name, "error": str(error)})
        return found

    def look(self, record: Record) -> dict[str, Any]:
        (done,) = execute(self.asking("look", self.head(record), run=record.folder), _ANSWER_SECONDS)
        return answered(self.transport, done)

    def console(self, worker: int, job: str | None, follow: bool) -> list[str]:
        (done,) = execute(self.following(worker, 0, job, follow), _FOLLOW_SECONDS)
        if done.code == 255:
            raise LaunchError(
                f"{self.transport.workers[worker]}: {self.transport.explain(done.command, 255, done.errors)}"
            )
        if done.code and (answer := decoded(done.out)) is not None and "error" in answer:
            raise LaunchError(f"{self.transport.workers[worker]}: {answer['error']}")
        return done.out.partition(CONSOLE.decode())[2].splitlines()

    def stop(self, record: Record, at_once: bool = False) -> None:
        """Asks the head to save and leave; where it is out of reach, every host."""
        head = self.head(record)
        limit = _ANSWER_SECONDS + self.config.timeouts.stop  # a container is waited for
        (done,) = execute(self.stopping(head, record.job, at_once), limit)
        if done.code:
            why = self.transport.explain(done.command, done.code, done.errors)
            tell(f"lockstep: {self.transport.workers[head]}: {why}; the others are asked")
            execute(self.stopping(None, record.job, at_once), limit)

    def pull(self, record: Record, out: Path) -> list[Path]:
        """Copies the run's folder here: all of the head's, and the logs of the others."""
        if record.folder is None:
            raise ConfigError(f"pod {self.name}: no run was started there yet")
        name = PurePosixPath(record.folder).name
        head, unpacked = self.head(record), []
        order = [head, *(each for each in range(len(self.transport.workers)) if each != head)]
        for worker in order:
            (done,) = execute(self.asking("pack", worker, run=record.folder), _COPY_SECONDS)
            answer = answered(self.transport, done)
            if answer["file"] is None:
                continue
            local = archive_of(self.name).with_name(f"pull-{worker}.tar")
            local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._all_well(execute(self.transport.fetch(answer["file"], local, worker), _COPY_SECONDS))
                unpacked += unpack_run(local, out, name, everything=worker == head, size=answer["size"])
            finally:
                local.unlink(missing_ok=True)
        return unpacked


def _common(inspections: Sequence[Inspection]) -> dict[str, str]:
    """Returns the files that all of these hosts have, and that need not travel."""
    first, *rest = (each.found["code"] for each in inspections)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in rest)}


def _newest_first(found: list[Inspection], record: Record) -> list[Inspection]:
    """Puts the host with the newest checkpoint first, so that it leads: the run may be on its disk alone."""
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
