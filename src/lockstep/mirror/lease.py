"""Whose a run's folder in a bucket is: an object with the host, the process and the time, which its holder renews.

A bucket has no locks, so this is best effort: of two that take it in the same second, the one that wrote last has it,
and the other finds out when it looks again. As for a lease on a disk, whoever finds one watches it: one that does not
change for a while, by the watcher's own clock, is that of a holder that is gone. No two clocks are compared.

What it says stays there when it is let go of: a folder on some host's disk is the newest there is of a run if it was
the last to hold the lease, and by the token it knows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from lockstep.errors import ConfigError
from lockstep.mirror.url import Url
from lockstep.record.holder import Holder

logger = logging.getLogger(__name__)

LEASE_FILE = ".lease"
BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0  # four beats
_LOOK_SECONDS = 2.0
# Between taking it and believing it: of two that take it at once, one then finds the other.
_SETTLE_SECONDS = 0.5
_LET_GO_SECONDS = 5.0


class Objects(Protocol):
    """A bucket, as far as a lease needs it."""

    url: Url

    def read(self, path: str) -> bytes | None: ...

    def write(self, path: str, data: bytes) -> None: ...


class BucketLease:
    """Held from `take` to `release`, or until somebody who took this process for gone has taken it over."""

    def __init__(self, bucket: Objects, holder: Holder) -> None:
        self._bucket, self._holder, self.token = bucket, holder, uuid.uuid4().hex
        self._beats = 0
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat_regularly, name="lockstep-bucket-lease", daemon=True)
        self.is_lost = False

    @classmethod
    def take(cls, bucket: Objects, holder: Holder, before: Callable[[str], None]) -> BucketLease:
        """The lease, once it is free; ConfigError, naming the holder, where somebody is at work there.

        `before` is told the token before it is written there.
        """
        lease = cls(bucket, holder)
        found = bucket.read(LEASE_FILE)
        if found is not None and not _is_free(bucket, found):
            raise ConfigError(_refusal(bucket.url, found))
        before(lease.token)
        lease._beat()
        time.sleep(_SETTLE_SECONDS)
        if not lease._is_ours():
            raise ConfigError(_refusal(bucket.url, bucket.read(LEASE_FILE) or b""))
        lease._beating.start()
        return lease

    def release(self) -> None:
        """Let go of it, whatever becomes of the word that says so: it would be found to be stale."""
        self._done.set()
        letting_go = threading.Thread(target=self._let_go, name="lockstep-bucket-lease-end", daemon=True)
        letting_go.start()
        letting_go.join(_LET_GO_SECONDS)

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            if self._is_ours():
                self._bucket.write(LEASE_FILE, self._holder.encode(token=self.token, beat=self._beats, released=True))

    def _beat_regularly(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):  # a service that does not answer now may do so next time
                if not self._is_ours():
                    self.is_lost = True
                    return
                if not self._done.is_set():
                    self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._bucket.write(LEASE_FILE, self._holder.encode(token=self.token, beat=self._beats, released=False))

    def _is_ours(self) -> bool:
        return last_token(self._bucket) == self.token


def last_token(bucket: Objects) -> object:
    """Of whoever held the lease last, or holds it."""
    return _told(bucket.read(LEASE_FILE) or b"").get("token")


def _is_free(bucket: Objects, found: bytes) -> bool:
    holder = Holder.decode(found)
    if _told(found).get("released") is True:
        return True
    if holder is not None and holder.is_here:
        return holder.is_gone
    logger.warning("%s: held by %s; waiting up to %g s to see whether it is still at work", bucket.url,
                   holder or "an unknown process", STALE_SECONDS)  # fmt: skip
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = bucket.read(LEASE_FILE)
        if now != found:
            return now is None or _told(now).get("released") is True
    return True


def _told(data: bytes) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(data)
        return told if isinstance(told, dict) else {}
    return {}


def _refusal(url: Url, found: bytes) -> str:
    who = Holder.decode(found) or "an unknown process"
    return f"{url}: another run is at work in this folder: {who}; wait for it or end it first"
