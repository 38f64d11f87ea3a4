"""The line between a host and the head: a thread that sends heartbeats with news of the host and receives orders.

A store that does not answer blocks this thread alone. A connection that was closed is made again at once, or not at
all: the store tells the head, which waits as long.
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
# A host, or the head, that is silent for so long counts as gone. A heartbeat comes five times a second; on a link that
# loses one packet in twenty, TCP needs a few seconds now and then.
GONE_SECONDS = 10.0
# The connection of a host whose processes died is closed by its system. Something on the way may close that of a living
# one: it comes back within a second and, on a slow link, some exchanges more.
_CLOSED_SECONDS, _CLOSED_EXCHANGES = 1.0, 4
_INTERVAL = 0.2
_AGAIN_SECONDS = 0.05


def host_key(index: int) -> str:
    return f"pod/host/{index}"


def closed_key(index: int) -> str:
    """Returns the key that the store sets, to the number of the connection, when one of this host is closed."""
    return f"pod/closed/{index}"


def closed_patience(exchange: object) -> float:
    """Returns how long a host may take to reconnect; `exchange` is what its last heartbeat took."""
    seconds = exchange if isinstance(exchange, int | float) and exchange > 0 else 0.0
    return min(_CLOSED_SECONDS + _CLOSED_EXCHANGES * seconds, GONE_SECONDS)


class Line:
    def __init__(self, connect: Callable[[float], Client], join_seconds: float, index: int) -> None:
        """`connect` gets a limit in seconds: at first, as long as hosts may take to come together."""
        self._connect, self._join_seconds, self._index = connect, join_seconds, index
        self._said: dict[str, Any] = {}
        self._count = 0
        self._clock = RunningClock()
        self._answered = self._clock.now()
        self._done = threading.Event()
        self.heard: dict[str, Any] = {}
        self.problem: str | None = None  # why there is no connection any more
        self._why: str | None = None  # the last one was closed
        self._exchange = 0.0  # seconds that the last beat took, there and back
        self._thread = threading.Thread(target=self._talk, name="lockstep-line", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def say(self, **news: Any) -> None:
        self._said = {**self._said, **news}

    @property
    def quiet(self) -> float:
        """Seconds since the head's store answered, without pauses of this whole machine."""
        return self._clock.now() - self._answered

    def close(self) -> None:
        """Sends the last news and ends."""
        self._done.set()
        connected = bool(self.heard) and self.problem is None and self.quiet < GONE_SECONDS
        self._thread.join(2 * GONE_SECONDS if connected else 0.0)

    def _talk(self) -> None:
        connections, limit = 0, self._join_seconds
        while True:
            try:
                client = self._connect(limit)
            except (StoreLost, OSError) as error:
                self.problem = self._why or str(error) or type(error).__name__
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
        while True:
            last = self._done.is_set()
            self._count += 1
            began = time.monotonic()
            news = {**self._said, "count": self._count, "exchange": self._exchange}
            client.set(host_key(self._index), json.dumps(news))
            message = client.read(HEAD_KEY)
            self._exchange = time.monotonic() - began
            self.heard = decoded(message) or self.heard
            self._answered = self._clock.now()
            if last:
                return
            self._done.wait(_INTERVAL)


def decoded(message: bytes | None) -> dict[str, Any] | None:
    if message is None:
        return None
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
