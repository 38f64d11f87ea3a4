"""What connects a rank with the driver: log lines, rows and its failure on the way out, requests on the way in."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

import ray

from lockstep.distributed.failure import Report
from lockstep.engine.stop_requests import StopRequests
from lockstep.ray.mailbox import ANSWER_SECONDS, Event
from lockstep.record import display
from lockstep.record.logs import screen_handler
from lockstep.record.writers import Row

# A request is heard within this time, and a line shown: more often would cost the training more than it is worth.
_INTERVAL = 0.5


class Relay:
    """A thread that carries events to the mailbox and requests back, until the rank is done."""

    def __init__(self, mailbox: Any, rank: int, requests: StopRequests) -> None:
        self._mailbox, self._rank = mailbox, rank
        self._worker = uuid.uuid4().hex  # so that a late message is not taken for one of the worker that came after
        self.requests = requests
        self._saves: int | None = None  # how often a save had been asked for before this rank began
        self._pending: list[Event] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._exchange_regularly, name="lockstep-relay", daemon=True)

    def may_begin(self) -> bool:
        return bool(ray.get(self._mailbox.may_begin.remote(), timeout=ANSWER_SECONDS))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join(ANSWER_SECONDS)

    def send(self, kind: str, **content: Any) -> None:
        with self._lock:
            self._pending.append({"kind": kind, "rank": self._rank, "worker": self._worker, **content})

    def failed(self, report: Report) -> None:
        """Say at once why this rank ends: its process may be gone in a moment."""
        self.send("failed", report=asdict(report))
        self._exchange()

    def _exchange_regularly(self) -> None:
        while not self._done.wait(_INTERVAL):
            # A mailbox that does not answer went away with the driver, and Ray ends this rank as well.
            with contextlib.suppress(Exception):
                self._exchange()
        with contextlib.suppress(Exception):
            self._exchange()

    def _exchange(self) -> None:
        with self._lock:
            events, self._pending = self._pending, []
        if not events and self._rank != 0:
            return
        asked = ray.get(self._mailbox.tell.remote(events), timeout=ANSWER_SECONDS)
        if self._rank != 0:  # the pulse tells the others, at the same step
            return
        if asked["leave"] is not None and self.requests.leave is None:
            self.requests.leave = asked["leave"]
        if self._saves is not None and asked["saves"] > self._saves:
            self.requests.save = True
        self._saves = asked["saves"]


class RelayedDisplay(display.Display):
    """Rank 0's display: lines for its own log, and the numbers for the display of the driver."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def begin(self, step: int, epoch: int, total_steps: int | None) -> None:
        super().begin(step, epoch, total_steps)
        self._relay.send("begin", step=step, epoch=epoch, total_steps=total_steps)

    def row(self, row: Row, lags: list[float]) -> None:
        super().row(row, lags)
        self._relay.send("row", row=dict(row), lags=list(lags))


class RelayedLog(logging.Handler):
    """Rank 0's log, on its way to the screen of the driver. What the display says goes there in another way."""

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


@contextlib.contextmanager
def printing_through(relay: Relay) -> Iterator[None]:
    """What the task prints on rank 0 appears on the driver's terminal."""
    out: Any = _RelayedStream(sys.stdout, relay)
    err: Any = _RelayedStream(sys.stderr, relay)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
