"""The line between a host and the head: a thread that says how it is here, and hears what is wanted.

It beats whatever the rest of the agent does. A store that does not answer holds up this thread alone: whoever asks sees
how long nothing was heard. A connection that was closed is made again at once, or not at all: the head hears of it
from the store, and waits as long.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.distributed.store.client import Client, StoreLost
from lockstep.distributed.watch.stall import RunningClock

HEAD_KEY = "pod/head"
# How long nothing may be heard of a host, or of the head, before it counts as gone. A beat comes five times a second;
# on a link that loses one packet in twenty, TCP needs a few seconds now and then.
GONE_SECONDS = 10.0
# The connection of a host whose processes die is closed by its system. So may that of a living one be, by something on
# the way: it comes back within a second and, on a slow link, some exchanges more.
_CLOSED_SECONDS, _CLOSED_EXCHANGES = 1.0, 4
_INTERVAL = 0.2
_AGAIN_SECONDS = 0.05


def host_key(index: int) -> str:
    return f"pod/host/{index}"


def closed_key(index: int) -> str:
    """What the store sets when a connection of this host is closed: which one it was."""
    return f"pod/closed/{index}"


def closed_patience(exchange: object) -> float:
    """How long a host may take to come back whose connection was closed; `exchange`: what a beat last took it."""
    seconds = exchange if isinstance(exchange, int | float) and exchange > 0 else 0.0
    return min(_CLOSED_SECONDS + _CLOSED_EXCHANGES * seconds, GONE_SECONDS)


class Line:
    """Open it, say what is to be known of this host, and read what the head said last."""

    def __init__(self, connect: Callable[[float], Client], join_seconds: float, index: int) -> None:
        """`connect` gets a limit in seconds: for the first time, as long as hosts may take to come together."""
        self._connect, self._join_seconds, self._index = connect, join_seconds, index
        self._said: dict[str, Any] = {}
        self._count = 0
        self._clock = RunningClock()
        self._answered = self._clock.now()
        self._done = threading.Event()
        self.heard: dict[str, Any] = {}
        self.trouble: str | None = None  # why there is no connection any more
        self._why: str | None = None  # the last one was closed
        self._exchange = 0.0  # seconds that the last beat took, there and back
        self._thread = threading.Thread(target=self._talk, name="lockstep-line", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def say(self, **news: Any) -> None:
        self._said = {**self._said, **news}

    @property
    def quiet(self) -> float:
        """Seconds since the head's store answered; a pause of this whole machine does not count."""
        return self._clock.now() - self._answered

    def close(self) -> None:
        """Send the last word and end."""
        self._done.set()
        connected = bool(self.heard) and self.trouble is None and self.quiet < GONE_SECONDS
        self._thread.join(2 * GONE_SECONDS if connected else 0.0)

    def _talk(self) -> None:
        connections, limit = 0, self._join_seconds
        while True:
            try:
                client = self._connect(limit)
            except (StoreLost, OSError) as error:
                self.trouble = self._why or str(error) or type(error).__name__
                return
            try:
                connections += 1
                client.set_final_message(closed_key(self._index), str(connections))
                self._converse(client)
                return
            except (StoreLost, OSError) as error:
                client.close()
                self._why = str(error) or type(error).__name__
                time.sleep(_AGAIN_SECONDS)
                limit = closed_patience(self._exchange)

    def _converse(self, client: Client) -> None:
        """Until the last word was said."""
        while True:
            last = self._done.is_set()
            self._count += 1
            began = time.monotonic()
            told = {**self._said, "count": self._count, "exchange": self._exchange}
            client.set(host_key(self._index), json.dumps(told))
            word = client.read(HEAD_KEY)
            self._exchange = time.monotonic() - began
            self.heard = decoded(word) or self.heard
            self._answered = self._clock.now()
            if last:
                return
            self._done.wait(_INTERVAL)


def decoded(word: bytes | None) -> dict[str, Any] | None:
    """What came over the network, where it is what we send."""
    if word is None:
        return None
    try:
        found = json.loads(word)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
