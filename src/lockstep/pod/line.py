"""The line between a host and the head: a thread that says how it is here, and hears what is wanted.

It beats whatever the rest of the agent does. A store that does not answer holds up this thread alone: whoever asks sees
how long nothing was heard.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from lockstep.distributed.store.client import Client, StoreLost
from lockstep.distributed.watch.clock import RunningClock

HEAD_KEY = "pod/head"
# How long nothing may be heard of a host, or of the head, before it counts as gone. A beat comes five times a second;
# on a link that loses one packet in twenty, TCP needs a few seconds now and then.
GONE_SECONDS = 10.0
_INTERVAL = 0.2


def host_key(index: int) -> str:
    return f"pod/host/{index}"


class Line:
    """Open it, say what is to be known of this host, and read what the head said last."""

    def __init__(self, connect: Callable[[], Client], index: int) -> None:
        self._connect, self._index = connect, index
        self._said: dict[str, Any] = {}
        self._count = 0
        self._clock = RunningClock()
        self._answered = self._clock.now()
        self._done = threading.Event()
        self.heard: dict[str, Any] = {}
        self.trouble: str | None = None  # why the connection ended
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
        try:
            client = self._connect()
            while True:
                last = self._done.is_set()
                self._count += 1
                client.set(host_key(self._index), json.dumps({**self._said, "count": self._count}))
                word = client.read(HEAD_KEY)
                self.heard = decoded(word) or self.heard
                self._answered = self._clock.now()
                if last:
                    return
                self._done.wait(_INTERVAL)
        except (StoreLost, OSError) as error:
            self.trouble = str(error) or type(error).__name__


def decoded(word: bytes | None) -> dict[str, Any] | None:
    """What came over the network, where it is what we send."""
    if word is None:
        return None
    try:
        found = json.loads(word)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
