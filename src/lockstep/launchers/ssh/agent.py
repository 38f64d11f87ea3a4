"""The agent of a job on one host: detached from any login, it starts the ranks there and ends with them.

`python -P -m lockstep.launchers.ssh.agent JOB_FOLDER`, by lockstep.launchers.ssh.host. The agent of the first host
also serves the store that all ranks meet at, and leads (head.py). Every agent does what the head says, and ends its
ranks where nothing is heard of the head any more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.distributed.failure import Result
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client, connect_tcp
from lockstep.distributed.store.server import Server, listen_on_tcp
from lockstep.distributed.watch.stall import Limits
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, LockstepError
from lockstep.launchers.local.fork_server import warm_up
from lockstep.launchers.plan import available_cores
from lockstep.launchers.ssh.ending import conclude
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.head import Head
from lockstep.launchers.ssh.host_ranks import HostRanks
from lockstep.launchers.ssh.line import GONE_SECONDS, Line
from lockstep.launchers.ssh.order import Order, Share, checked_env
from lockstep.mirror import staging
from lockstep.mirror.mark import mirrored
from lockstep.mirror.mirror import Mirror
from lockstep.mirror.url import parse
from lockstep.record import folder_lock, run_folder
from lockstep.terminal import make_safe, tell

_LOOK_SECONDS = 0.05
_LOST_HEAD_EXIT_CODE = 4
_MARK = ".seen-by-all-"


class Agent:
    """One host's part of a job."""

    def __init__(self, order: Order, job: Job) -> None:
        self._order, self._job = order, job
        self._config = order.run_config()
        self._signals = Signals(save_on_request=True)
        self._threads = self._config.launch.threads or max(1, available_cores() // order.here.processes)
        self._ranks: HostRanks | None = None
        self._attempt, self._saves = -1, 0

    def run(self) -> int:
        warm_up(self._threads)
        with self._signals.listening(), self._led() as head:
            line = Line(self._connect, self._config.timeouts.rendezvous, self._order.index)
            line.say(attempt=-1)
            line.open()
            try:
                code = self._follow(line)
            finally:
                if self._ranks is not None:
                    self._ranks.close()
                line.say(finished=True)
                line.close()
            return head.concluded() if head is not None else code

    def _follow(self, line: Line) -> int:
        """Do what the head says until it says that the job is over."""
        while True:
            word = line.heard
            if "finish" in word:
                return int(word["finish"])
            if line.trouble is not None or line.quiet > self._patience:
                return self._without_head(line)
            if self._signals.count and self._order.index:
                if not word:  # nobody leads yet, and nothing has begun
                    return INTERRUPTED_EXIT_CODE
                line.say(asked=True)
            if word.get("attempt", -1) != self._attempt:
                self._begin(word, line)
            if self._ranks is not None:
                self._tend(self._ranks, word, line)
            time.sleep(_LOOK_SECONDS)

    @property
    def _patience(self) -> float:
        return GONE_SECONDS if self._attempt >= 0 else self._config.timeouts.rendezvous

    def _begin(self, word: dict[str, Any], line: Line) -> None:
        """Take part in a new attempt, where this host has a share of it."""
        self._close_ranks()
        self._attempt = int(word["attempt"])
        world = [Share.model_validate(each) for each in word["shares"]]
        sees = _shared_mark(self._order).exists() if self._order.shared else None
        line.say(attempt=self._attempt, ended=None, sees_folder=sees)
        for slot, share in enumerate(world):
            if share.host == self._order.index:
                try:
                    _make_run_folder(self._order)
                    self._ranks = HostRanks(self._order, share, slot, world, self._attempt, self._threads)
                except (LockstepError, OSError) as error:
                    line.say(leaves=f"its ranks could not be started: {error}")

    def _tend(self, ranks: HostRanks, word: dict[str, Any], line: Line) -> None:
        if word.get("stop"):
            ranks.ask_to_stop()
        if int(word.get("save", 0)) > self._saves and self._order.index == 0:
            self._saves = int(word["save"])
            ranks.ask_to_save()
        if word.get("stacks"):
            ranks.dump_stacks()
        ended = ranks.end() if word.get("end") else ranks.poll()
        if ended is not None:
            self._close_ranks()
            line.say(ended=ended)

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _without_head(self, line: Line) -> int:
        """End what is here: whoever leads is gone, and takes this host for gone too."""
        head = self._order.head
        why = line.trouble or f"nothing was heard of it for {line.quiet:.0f} s"
        tell(
            f"lockstep: {self._order.here.name} ends its ranks: {head.name} ({head.address}), which leads this job, is "
            f"out of reach: {why}"
        )
        self._close_ranks()
        self._job.has_ended(_LOST_HEAD_EXIT_CODE, "lost the head")
        return _LOST_HEAD_EXIT_CODE

    def _connect(self, limit: float) -> Client:
        return connect_tcp(self._order.head.address, self._order.port, self._order.secret, limit)

    @contextlib.contextmanager
    def _led(self) -> Iterator[_Leading | None]:
        """On the first host: the store served, the run's folder held, and the head at work."""
        if self._order.index:
            self._job.has_begun(None)
            yield None
            return
        address, port = self._order.head.address, self._order.port
        try:
            server = Server(listen_on_tcp(address, port), self._order.secret)
        except OSError as error:
            raise LaunchError(f"{address} port {port}: nothing can listen there: {error.strerror}; start again, and "
                              "another port is chosen; launch.port names one") from None  # fmt: skip
        folder = Path(self._order.folder)
        url = None if self._order.url is None else parse(self._order.url, "--out")
        if url is not None:
            staging.existing_or_new(url, "--out", folder)
        _make_run_folder(self._order)
        with folder_lock.locked(folder), _marked(self._order), mirrored(folder, self._config, tell, url) as mirror:
            run_folder.has_begun(folder)
            limits = Limits.of(self._config.timeouts, str(self._config.runtime))
            self._job.has_begun(port)
            store = self._connect(self._config.timeouts.rendezvous)
            yield _Leading(Head(self._order, store, limits, self._signals), self._order, self._job, mirror)
        server.close()


class _Leading:
    """The head, in a thread of its own: what it hears does not wait for the ranks of its own host."""

    def __init__(self, head: Head, order: Order, job: Job, mirror: Mirror | None) -> None:
        self._head, self._order, self._job, self._mirror = head, order, job, mirror
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-head", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._head.run()
        except Exception as error:
            tell(traceback.format_exc())
            self._result = self._head.give_up(error)

    def concluded(self) -> int:
        """Say how it ended, and leave word of it."""
        self._thread.join()
        if self._result is None:  # what it raised is in the console
            self._job.has_ended(5, "failed")
            return 5
        code, status, said = conclude(self._order, self._result, self._head.world_size, self._mirror)
        self._job.has_ended(code, status, said)
        return code


def _shared_mark(order: Order) -> Path:
    """What only those find in the run's folder who see that of the first host."""
    return Path(order.folder) / f"{_MARK}{order.job}"


@contextlib.contextmanager
def _marked(order: Order) -> Iterator[None]:
    """By the first host, before anybody is told to begin."""
    if not order.shared:
        yield
        return
    mark = _shared_mark(order)
    for left in mark.parent.glob(f"{_MARK}*"):  # by a job that was killed
        left.unlink(missing_ok=True)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _make_run_folder(order: Order) -> None:
    """On every host, with the config in it: on the first it is the run, on the others it is for logs.

    Where they share a disk, the first has written it by the time that an attempt begins.
    """
    folder, config = Path(order.folder), order.run_config()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        known = run_folder.read_plain_config(folder) == config.plain()
    except ConfigError:
        known = False
    if not known:
        run_folder.write_config(folder, config)


def _speak_into(console: Path) -> None:
    """What this process and its ranks print goes to a file, which is followed from elsewhere."""
    descriptor = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def main(job_folder: str) -> int:
    os.umask(0o077)
    job = Job(Path(job_folder))
    _speak_into(job.console)
    make_safe()
    said = ""
    try:
        job.hold()
        order = Order.model_validate_json(job.order.read_text(encoding="utf-8"))
        os.environ.update(checked_env(order.env))
        code = Agent(order, job).run()
    except (LockstepError, ValidationError, OSError) as error:
        said = f"lockstep: {error}"
        tell(said)
        code = error.exit_code if isinstance(error, LockstepError) else 2
    with contextlib.suppress(OSError):  # no room even for that: the console has said so
        if job.ended() is None:
            job.has_ended(code, "ended", said)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
