"""What runs on every Ray worker of `lockstep train`: a rank, connected with the driver through the mailbox.

Ray forwards log lines to the driver, but no progress, no requests to stop or save, and not why a rank ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import ray
import torch

from lockstep import worker
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Report, report
from lockstep.distributed.topology import Place, ranks_text
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError, RankStalled
from lockstep.ray import session
from lockstep.ray.mailbox import ANSWER_SECONDS, Event, NodeSync, ask_mailbox, repeated
from lockstep.ray.reporting import BackgroundReporter
from lockstep.record import display
from lockstep.record.logs import screen_handler
from lockstep.record.writers import Row

# Within this time a request is heard and a line shown: exchanging more often would slow the training down.
_EXCHANGE_SECONDS = 0.5


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker, beside the config, which the backend has."""

    folder: str  # the run's folder
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
    mailbox: Any
    threads: int
    storage: str | None  # where the user said that all nodes share it
    here: str | None  # the driver's working directory, if workers are on its machine


def main(orders: dict[str, Order]) -> None:
    """Trains as one rank. The session does what follows the last step, and sends the last message to the driver."""
    order, current = orders["order"], session.current()
    place, config = current.present.topology.place, current.settings
    relay = Relay(order.mailbox, place.rank, current.requests)
    if not relay.may_begin():
        return
    relaying, syncing = contextlib.ExitStack(), contextlib.ExitStack()
    folder_sync: NodeSync | None = None
    relaying.enter_context(relay.running())
    if place.rank == 0:
        relaying.enter_context(contextlib.redirect_stdout(_RelayedStream(sys.stdout, relay)))
        relaying.enter_context(contextlib.redirect_stderr(_RelayedStream(sys.stderr, relay)))
    current.ended = lambda error: _ended(error, place, relay, relaying, syncing)
    current.outlet = worker.Outlet(_RelayedDisplay(relay), _RelayedLog(relay))
    current.make_reporter = lambda run: BackgroundReporter(run, folder_sync.push if folder_sync else None)
    current.present.heartbeat.tell = lambda message: relay.failed(report(RankStalled(message), place.rank, place.host))
    current.folder_is_held = True
    relay.send("started", host=place.host)
    if order.here is not None:
        os.chdir(order.here)
    if config.runtime != "xla":  # which has set its own
        torch.set_num_threads(order.threads)
    folder_sync = _folder_sync(order, current)
    if folder_sync is not None:
        syncing.enter_context(folder_sync.running())
    assert isinstance(config, RunConfig)
    session.fit(config)


def _folder_sync(order: Order, current: session.Session) -> NodeSync | None:
    """Starts to sync the run's folder if this node does not see it; returns once every node has what it needs."""
    group, place = current.present.group, current.present.topology.place
    sees = (Path(order.folder) / order.mark).exists()
    blind = [rank for rank, each in enumerate(group.gather(sees, "who sees the run's folder")) if not each]
    if not blind:
        return None
    if order.storage is not None:
        raise ConfigError(
            f"launch.ray.storage: {order.storage} is not the same folder on all nodes: {ranks_text(blind)} cannot see "
            f"the run's folder {order.folder} there (this is rank {place.rank} on {place.host})"
        )
    current.shares_folder = False
    folder_sync = None
    if not sees:
        keep = current.settings.checkpoint.keep
        folder_sync = NodeSync(ask_mailbox(order.mailbox), Path(order.folder), place, keep)
        folder_sync.pull()
    group.barrier("the run's folder on all nodes")
    return folder_sync


def _ended(
    error: BaseException | None,
    place: Place,
    relay: Relay,
    relaying: contextlib.ExitStack,
    syncing: contextlib.ExitStack,
) -> None:
    try:
        syncing.close()
    except Exception as failed:  # what was not pushed is lost with this node
        error = error or failed
    with relaying, contextlib.suppress(Exception):  # the driver may be gone
        if error is None or isinstance(error, Preempted):
            relay.send("ended", exit_code=error.code if error else 0)
        else:
            relay.failed(report(error, place.rank, place.host))


class Relay:
    """A thread that carries events to the mailbox and requests back, until the rank is done."""

    def __init__(self, mailbox: Any, rank: int, requests: StopRequests) -> None:
        self._mailbox, self._rank, self._requests = mailbox, rank, requests
        self._worker = uuid.uuid4().hex  # distinguishes late messages from those of the worker that came after
        self._saves: int | None = None  # how often a save had been requested before this rank began
        self._pending: list[Event] = []
        self._lock = threading.Lock()

    def may_begin(self) -> bool:
        return not self._tell([])["closed"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        # A mailbox that does not answer went away with the driver, and Ray ends this rank as well.
        try:
            with repeated(self._exchange, _EXCHANGE_SECONDS, "lockstep-relay"):
                yield
        finally:
            with contextlib.suppress(Exception):
                self._exchange()

    def send(self, kind: str, **content: Any) -> None:
        with self._lock:
            self._pending.append({"kind": kind, "rank": self._rank, "worker": self._worker, **content})

    def failed(self, report: Report) -> None:
        """Sends at once why this rank ends: its process may be gone in a moment."""
        self.send("failed", report=asdict(report))
        self._exchange()

    def _exchange(self) -> None:
        with self._lock:
            events, self._pending = self._pending, []
        if not events and self._rank != 0:
            return
        asked = self._tell(events)
        if self._rank != 0:  # the others hear of it by the control sync, at the same step
            return
        if asked["leave"] is not None and self._requests.leave is None:
            self._requests.leave = asked["leave"]
        if self._saves is not None and asked["saves"] > self._saves:
            self._requests.save = True
        self._saves = asked["saves"]

    def _tell(self, events: list[Event]) -> dict[str, Any]:
        answer: dict[str, Any] = ray.get(self._mailbox.tell.remote(events), timeout=ANSWER_SECONDS)
        return answer


class _RelayedDisplay(display.Display):
    """Writes lines to rank 0's log, and sends the numbers to the display of the driver."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def begin(self, step: int, epoch: int, total_steps: int | None) -> None:
        super().begin(step, epoch, total_steps)
        self._relay.send("begin", step=step, epoch=epoch, total_steps=total_steps)

    def row(self, row: Row, lags: list[float]) -> None:
        super().row(row, lags)
        self._relay.send("row", row=dict(row), lags=list(lags))


class _RelayedLog(logging.Handler):
    """Sends rank 0's log to the driver, without the lines of its display."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self.setFormatter(screen_handler(None).formatter)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != display.__name__:
            self._relay.send("line", text=self.format(record))


class _RelayedStream:
    """Standard output of rank 0: whole lines go to the driver as well."""

    def __init__(self, stream: TextIO, relay: Relay) -> None:
        self._stream, self._relay, self._rest = stream, relay, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._relay.send("line", text=line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
