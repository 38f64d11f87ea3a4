"""The head of a job, its store and the lines of hosts to it: real ones, on this machine, without ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import wait_until
from lockstep.distributed.failure import Result
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client, connect_tcp
from lockstep.distributed.store.server import Server, listen_on_tcp
from lockstep.distributed.store.wire import fresh
from lockstep.distributed.watch.stall import Limits
from lockstep.errors import INTERRUPTED_EXIT_CODE
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.head import Head, HeadThread, Line
from lockstep.launchers.ssh.record import Host, Order

TASK = Path(__file__).parents[1] / "tasks.py"


class Leading:
    """A store, and a head in a thread of its own; hosts come when a test has them come."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(listen_on_tcp("127.0.0.1", 0), secret := fresh())
        run = folder / "run"
        run.mkdir()
        self.order = Order(
            pod="p", job="j", index=0, port=self.server.port, secret=secret, folder=str(run),
            hosts=tuple(
                Host(name=name, address="127.0.0.1", first=at, count=1) for at, name in enumerate(("anna", "bert"))
            ),
            config={"task": f"{TASK}:Tiny", "processes": 2, "timeouts": {"rendezvous": 20.0}},
        )  # fmt: skip
        self.signals = Signals(save_on_request=True)
        limits = Limits.of(self.order.run_config().timeouts, "cpu")
        self.head = Head(self.order, self.connect(5.0), limits, self.signals)
        self.result: Result | None = None
        self.lines: list[Line] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def connect(self, limit: float) -> Client:
        return connect_tcp("127.0.0.1", self.order.port, self.order.secret, limit)

    def come(self, index: int) -> Line:
        line = Line(self.connect, 5.0, index)
        line.say(attempt=-1)
        line.open()
        self.lines.append(line)
        return line

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        self.result = self.head.run()

    def end(self) -> None:
        """Asked twice, with nobody who has ranks to end."""
        self.signals.count = 2
        for line in self.lines:
            line.say(attempt=0, ended={"exit_codes": {}, "reports": []}, finished=True)
        if self._thread.ident is not None:
            self._thread.join(20)
        for line in self.lines:
            line.close()
        self.server.close()

    def ended(self, limit: float) -> Result:
        self._thread.join(limit)
        assert self.result is not None, "the head is still at work"
        return self.result


@pytest.fixture
def leading(tmp_path: Path) -> Iterator[Leading]:
    made = Leading(tmp_path)
    try:
        yield made
    finally:
        made.end()


_AGENT = """
import sys, time
from lockstep.distributed.store.client import connect_tcp
from lockstep.launchers.ssh.head import Line
port, secret = int(sys.argv[1]), sys.stdin.readline().strip()
line = Line(lambda limit: connect_tcp("127.0.0.1", port, secret, limit), 5.0, 1)
line.say(attempt=-1)
line.open()
while line.heard.get("attempt", -1) < 0:
    time.sleep(0.01)
print("at work", flush=True)
time.sleep(60)
"""


def test_a_host_whose_processes_are_killed_is_named_within_seconds(leading: Leading) -> None:
    """Its system closes the connection: nobody waits for ten seconds of silence."""
    leading.come(0)
    leading.start()
    agent = subprocess.Popen(
        [sys.executable, "-P", "-c", _AGENT, str(leading.order.port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(f"{leading.order.secret}\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "at work\n"
        agent.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: leading.head.lost, what="the host to be missed")
        assert time.monotonic() - killed < 3.0
    # The first host's own line says nothing of its ranks, which are waited for at the end.
    leading.lines[0].say(attempt=0, ended={"exit_codes": {}, "reports": []})
    failure = leading.ended(10).failure
    assert failure is not None and failure.host == "bert"
    assert "host bert (rank 1) is gone: its connection was closed" in failure.cause


def test_a_job_that_is_stopped_while_hosts_are_still_coming_ends(leading: Leading) -> None:
    anna = leading.come(0)
    leading.start()
    wait_until(lambda: anna.heard, what="the head's word")
    leading.signals.count = 1
    result = leading.ended(10)
    assert result.exit_code == INTERRUPTED_EXIT_CODE and result.nothing_to_save and result.failure is None
    wait_until(lambda: anna.heard.get("finish") == INTERRUPTED_EXIT_CODE, what="the last word of the head")


def test_nobody_waits_for_a_head_that_fell(leading: Leading, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By what a host says that is not as we write it: a fault of ours, and still all hosts are told of the end."""
    job = Job(tmp_path / "job")
    job.path.mkdir()
    anna, bert = leading.come(0), leading.come(1)
    led = HeadThread(leading.head, leading.order, job, None)
    wait_until(lambda: bert.heard.get("attempt") == 0, what="the head's word")
    bert.say(attempt=0, ended={"exit_codes": {"not a rank": 1}, "reports": []})
    for line in (anna, bert):
        wait_until(lambda line=line: line.heard.get("finish") == 5, what="the last word of the head")  # type: ignore[misc]
        line.say(finished=True)
    assert led.concluded() == 5
    assert (job.ended() or {}).get("exit_code") == 5
    said = capfd.readouterr().err
    assert "the head of the job failed: ValueError" in said and "Traceback" in said
