"""The agent of a job on one host: it starts the ranks there, detached from any login, and ends with them.

`python -P -m lockstep.launchers.ssh.agent JOB_FOLDER`, started by host.py. The agent of the first host also serves the
store for all ranks, and leads (head.py). Every agent follows the head, and ends its ranks where the head is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.distributed.failure import Report
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client, connect_tcp
from lockstep.distributed.store.server import Server, listen_on_tcp
from lockstep.distributed.store.wire import VARIABLE as SECRET
from lockstep.distributed.topology import NETWORK_STORE, Place, Topology
from lockstep.distributed.watch.stall import Limits
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, LockstepError
from lockstep.launchers.local.fork_server import warm_up
from lockstep.launchers.local.ranks import Ranks, start
from lockstep.launchers.plan import LaunchPlan, ProcessPlan, thread_count
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.head import GONE_SECONDS, Head, HeadThread, Line
from lockstep.launchers.ssh.host import interface_of
from lockstep.launchers.ssh.record import Order, checked_env
from lockstep.mirror import staging
from lockstep.mirror.mark import mirrored
from lockstep.mirror.mirror import Mirror
from lockstep.mirror.url import Url, parse
from lockstep.record import folder_lock, run_folder
from lockstep.terminal import make_safe, tell

_LOOK_SECONDS = 0.05
_LOST_HEAD_EXIT_CODE = 4


class Agent:
    def __init__(self, order: Order, job: Job) -> None:
        self._order, self._job = order, job
        self._config = order.run_config()
        self._signals = Signals(save_on_request=True)
        self._threads = thread_count(self._config.launch.threads, order.here.count, os.environ)
        self._ranks: Ranks | None = None
        self._attempt, self._saves = -1, 0
        self._asked = self._dumped = False  # in this attempt

    def run(self) -> int:
        warm_up(self._threads)
        with self._signals.listening(), self._leading() as head:
            line = Line(self._connect, self._config.timeouts.rendezvous, self._order.index)
            line.say(attempt=-1)
            line.open()
            try:
                code = self._follow(line)
            finally:
                self._close_ranks()
                line.say(finished=True)
                line.close()
            return head.concluded() if head is not None else code

    def _follow(self, line: Line) -> int:
        """Follows the head until it says that the job is over."""
        while True:
            message = line.heard
            if "finish" in message:
                return int(message["finish"])
            if line.problem is not None or line.quiet > self._patience:
                return self._without_head(line)
            if self._signals.count and self._order.index:
                if not message:  # nobody leads yet, and nothing has begun
                    return INTERRUPTED_EXIT_CODE
                line.say(asked=True)
            if message.get("attempt", -1) != self._attempt:
                self._begin(message, line)
            if self._ranks is not None:
                self._tend(self._ranks, message, line)
            time.sleep(_LOOK_SECONDS)

    @property
    def _patience(self) -> float:
        return GONE_SECONDS if self._attempt >= 0 else self._config.timeouts.rendezvous

    def _begin(self, message: dict[str, Any], line: Line) -> None:
        """Starts the ranks of a new attempt."""
        self._close_ranks()
        self._attempt = int(message["attempt"])
        line.say(attempt=self._attempt, ended=None)
        try:
            _make_run_folder(self._order)
            self._asked = self._dumped = False
            self._ranks = start(_plan(self._order, self._attempt, self._threads))
        except (LockstepError, OSError) as error:
            line.say(leaves=f"its ranks could not be started: {error}")

    def _tend(self, ranks: Ranks, message: dict[str, Any], line: Line) -> None:
        if message.get("stop") and not self._asked:
            self._asked = True
            ranks.ask_to_stop()
        if int(message.get("save", 0)) > self._saves and self._order.index == 0:
            self._saves = int(message["save"])
            ranks.ask_to_save()
        if message.get("stacks") and not self._dumped:
            self._dumped = True
            ranks.dump_stacks()
        if message.get("end"):
            ranks.end()
            ended: dict[str, Any] | None = {"exit_codes": {}}
        else:
            ended = self._ended(ranks)
        if ended is not None:
            reports = [asdict(each) for each in ranks.reports()]
            self._close_ranks()
            line.say(ended={"reports": reports, **ended})

    def _ended(self, ranks: Ranks) -> dict[str, Any] | None:
        """Returns how the ranks of this host ended, as plain data for the head."""
        ended, first = ranks.ended(), self._order.here.first
        if ended is None:
            return None
        if ended.without_server is not None:
            report = Report(first, socket.gethostname(), "LaunchError", ended.without_server, 5, 0.0)
            return {"reports": [asdict(report)], "exit_codes": {}}
        if ended.exit_codes:
            return {"exit_codes": {first + at: code for at, code in ended.exit_codes.items()}}
        return {"returned": {first + at: outcome.exit_code for at, outcome in ended.returned.items()}}

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def _without_head(self, line: Line) -> int:
        head = self._order.head
        why = line.problem or f"nothing was heard of it for {line.quiet:.0f} s"
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
    def _leading(self) -> Iterator[HeadThread | None]:
        """On the first host, serves the store, holds the run's folder and runs the head."""
        if self._order.index:
            self._say_it_has_begun()
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
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with folder_lock.locked(folder), self._mirrored(folder, url) as mirror:
            run_folder.has_begun(folder)
            limits = Limits.of(self._config.timeouts, str(self._config.runtime))
            self._say_it_has_begun()
            store = self._connect(self._config.timeouts.rendezvous)
            yield HeadThread(Head(self._order, store, limits, self._signals), self._order, self._job, mirror)
        server.close()

    def _mirrored(self, folder: Path, url: Url | None) -> contextlib.AbstractContextManager[Mirror | None]:
        _make_run_folder(self._order)
        return mirrored(folder, self._config, tell, url)

    def _say_it_has_begun(self) -> None:
        self._job.has_begun()
        if self._job.stop.exists():  # by a command that did not find this process yet
            self._signals.count, self._signals.name = 1, "lockstep pod stop"


def _plan(order: Order, attempt: int, threads: int) -> LaunchPlan:
    argv = (sys.executable, "-P", "-m", "lockstep.worker", order.folder)
    shared = {"OMP_NUM_THREADS": str(threads), SECRET: order.secret}
    interface = interface_of(order.here.address)
    if interface is not None:  # gloo and NCCL listen in the network of the run
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        shared.update({name: os.environ.get(name, interface) for name in names})
    processes = []
    for local_rank, rank in enumerate(order.here.ranks):
        topology = Topology(
            Place(rank, local_rank, order.index, order.here.name), order.world_size, order.here.count,
            address=order.head.address, port=order.port, attempt=attempt, store=NETWORK_STORE,
            launched_by_us=True, watched=True, hosts=len(order.hosts),
        )  # fmt: skip
        processes.append(ProcessPlan(order.here.name, argv, {**topology.to_env(), **shared}))
    return LaunchPlan(tuple(processes), threads, order.port)


def _make_run_folder(order: Order) -> None:
    """Writes the folder with the config: on the first host it is the run's, on the others it is for logs."""
    folder, config = Path(order.folder), order.run_config()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        known = run_folder.read_plain_config(folder) == config.plain()
    except ConfigError:
        known = False
    if not known:
        run_folder.write_config(folder, config)


def _print_to(console: Path) -> None:
    descriptor = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def main(job_folder: str) -> int:
    os.umask(0o077)
    job = Job(Path(job_folder))
    _print_to(job.console)
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
