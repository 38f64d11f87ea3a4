"""What runs on every Ray worker of `lockstep train`: a rank, connected with the driver through the mailbox.

Ray forwards output with the process id on every line and may lose the last lines, and it has no way to ask ranks to
save and leave, nor to say why a rank ended itself.
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
from lockstep.distributed.topology import ranks_text
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import PREEMPTED_EXIT_CODE, RankStalled
from lockstep.ray import session
from lockstep.ray.mailbox import ANSWER_SECONDS, NodeSync, ask_mailbox, repeated
from lockstep.ray.session import Reporter, Session

# Within this time a request is heard and a line shown: exchanging more often would slow the training down.
_EXCHANGE_SECONDS = 0.5


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker, beside the config, which the backend has."""

    folder: str  # the run's folder
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
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
    current.has_driver = True
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
            with _folder_here(order, current), current:
                session.fit(config)
                code = 0
        except BaseException as error:
            with contextlib.suppress(Exception):  # the driver may be gone
                relay.tell(report=asdict(report(error, place.rank, place.host)))
            raise
        relay.tell(exit_code=code)


@contextlib.contextmanager
def _folder_here(order: Order, current: Session) -> Iterator[None]:
    """Syncs the run's folder while the context is open if this node does not see it."""
    group, place = current.present.group, current.present.topology.place
    sees = (Path(order.folder) / order.mark).exists()
    blind = [rank for rank, each in enumerate(group.gather(sees, "who sees the run's folder")) if not each]
    with contextlib.ExitStack() as syncing:
        if not sees:
            keep = current.settings.checkpoint.keep
            folder_sync = NodeSync(ask_mailbox(order.mailbox), Path(order.folder), place, keep)
            folder_sync.pull()
            syncing.enter_context(folder_sync.running())
        if blind:
            group.barrier("the run's folder on all nodes")
            if place.rank == 0:
                print(f"{ranks_text(blind)}: the run's folder is not seen there, and is synced with the driver's")
        yield


class Relay:
    """Carries rank 0's output and facts of every rank to the mailbox, and the request to leave back to rank 0."""

    def __init__(self, mailbox: Any, rank: int, requests: StopRequests) -> None:
        self._mailbox, self._rank, self._requests = mailbox, rank, requests
        self._lines: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On rank 0, exchanges regularly while the context is open."""
        if self._rank != 0:  # which hears of requests by the control sync, at the same step
            yield
            return
        out, err = _RelayedStream(sys.stdout, self), _RelayedStream(sys.stderr, self)
        # A mailbox that does not answer went away with the driver, and Ray ends this rank as well.
        exchanging = repeated(self.tell, _EXCHANGE_SECONDS, "lockstep-relay")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), exchanging:
            yield

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
