"""What runs on every Ray worker of `lockstep train`: a rank, connected with the driver through a mailbox.

The mailbox is one small actor on the driver's node. Ray forwards output with the process id on every line and may lose
the last lines, and it has no way to ask ranks to save and leave, nor to say why a rank ended itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import ray
import torch

from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import report
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import PREEMPTED_EXIT_CODE, RankStalled
from lockstep.ray import session
from lockstep.ray.failures import Facts
from lockstep.ray.session import Reporter

# The mailbox has nothing else to do: without an answer for so long, the cluster counts as lost.
ANSWER_SECONDS = 60.0
# Within this time a request is heard and a line shown: exchanging more often would slow the training down.
_EXCHANGE_SECONDS = 0.5


class Mailbox:
    """Holds rank 0's output and facts of all ranks for the driver, and its request to leave for the ranks."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._facts: dict[int, Facts] = {}
        self._leave: str | None = None

    async def tell(self, rank: int, lines: list[str], facts: Facts) -> str | None:
        """Returns why to save and leave, if the driver asks for it."""
        self._lines += lines
        if "host" in facts:  # the first of a new attempt
            self._facts[rank] = {}
        self._facts.setdefault(rank, {}).update(facts)
        return self._leave

    async def take_lines(self) -> tuple[list[str], bool]:
        """Returns the lines since the last call, and whether a rank has begun."""
        lines, self._lines = self._lines, []
        return lines, bool(self._facts)

    async def take_facts(self) -> dict[int, Facts]:
        """Returns what ranks told of an attempt that is over."""
        facts, self._facts = self._facts, {}
        return facts

    async def ask_to_leave(self, reason: str) -> None:
        self._leave = reason


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker, beside the config, which the backend has."""

    folder: str  # the run's folder, which the driver holds
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
    url: str | None  # of the run's folder in object storage: rank 0 holds it instead
    mailbox: Any
    threads: int
    here: str | None  # the driver's working directory, if workers are on its machine
    of_sweep: bool  # the driver waits for metrics of validations


def main(orders: dict[str, Order]) -> None:
    """Trains as one rank, and tells the driver how that ended."""
    order, current = orders["order"], session.current()
    place, config = current.present.topology.place, current.settings
    assert isinstance(config, RunConfig)
    relay = Relay(order.mailbox, place.rank, current.requests)
    current.make_reporter = partial(Reporter, every=0.0, validations_only=True) if order.of_sweep else lambda run: None
    current.present.heartbeat.tell = lambda message: relay.tell(
        report=asdict(report(RankStalled(message), place.rank, place.host))
    )
    with relay.running():
        relay.tell(host=place.host)
        code = PREEMPTED_EXIT_CODE  # unless the training function returns
        try:
            if order.here is not None:
                os.chdir(order.here)
            if config.runtime != "xla":  # which has set its own
                torch.set_num_threads(order.threads)
            current.folder = _folder(order)
            with current:
                session.fit(config)
                code = 0
        except BaseException as error:
            with contextlib.suppress(Exception):  # the driver may be gone
                relay.tell(report=asdict(report(error, place.rank, place.host)))
            raise
        relay.tell(exit_code=code)


def _folder(order: Order) -> session.Folder:
    """Returns the folder that the driver holds, or one that rank 0 keeps in the bucket."""
    if order.url is None:
        return session.Folder(lambda: Path(order.folder), _REMEDY, mark=order.mark)
    from lockstep.mirror import staging
    from lockstep.mirror.url import parse

    url = parse(order.url, "launch.ray.storage")
    return session.Folder(lambda: staging.opened(url, "launch.ray.storage"), in_bucket=True)


_REMEDY = "Name a folder that all nodes share, or a bucket (s3://BUCKET/PREFIX), with launch.ray.storage or --out"


class Relay:
    """Carries rank 0's output and facts of every rank to the mailbox, and the request to leave back to rank 0."""

    def __init__(self, mailbox: Any, rank: int, requests: StopRequests) -> None:
        self._mailbox, self._rank, self._requests = mailbox, rank, requests
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._done = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On rank 0, exchanges regularly while the context is open."""
        if self._rank != 0:  # which hears of requests by the control sync, at the same step
            yield
            return
        out, err = _RelayedStream(sys.stdout, self), _RelayedStream(sys.stderr, self)
        thread = threading.Thread(target=self._exchange, name="lockstep-relay", daemon=True)
        thread.start()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            self._done.set()
            thread.join(ANSWER_SECONDS)

    def _exchange(self) -> None:
        while not self._done.wait(_EXCHANGE_SECONDS):
            # A mailbox that does not answer went away with the driver, and Ray ends this rank as well.
            with contextlib.suppress(Exception):
                self.tell()

    def write(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)

    def tell(self, **facts: Any) -> None:
        """Sends what was written and these facts."""
        with self._lock:
            lines, self._lines = self._lines, []
        if self._rank == 0 or facts:
            leave = ray.get(self._mailbox.tell.remote(self._rank, lines, facts), timeout=ANSWER_SECONDS)
            if self._rank == 0 and self._requests.leave is None:
                self._requests.leave = leave


class _RelayedStream:
    """Standard output of rank 0: whole lines go to the driver as well."""

    def __init__(self, stream: TextIO, relay: Relay) -> None:
        self._stream, self._relay, self._rest = stream, relay, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._relay.write(line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
