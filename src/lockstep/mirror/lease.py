"""The lease on a run's folder in a bucket: one object that names the writer, which renews it.

A bucket has no locks. Whoever finds a lease watches it: if it does not change for a while, by the watcher's own clock,
its holder is gone. No two clocks are compared. Every new holder gets a higher generation, the fencing token: it is part
of every manifest in the bucket, so that readers know which of two branches is the newer one. The holder reads the
lease before every change, and changes nothing once another process has taken it. A missing lease belongs to nobody:
the holder writes it anew.

The lease stays there when it is released: a copy on some host's disk is up to date if it knows the last token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError, LockstepError
from lockstep.mirror.url import Url
from lockstep.record.folder_lease import Holder

if TYPE_CHECKING:
    from lockstep.mirror.bucket import Bucket

logger = logging.getLogger(__name__)

LEASE_FILE = ".lease"
BEAT_SECONDS = 15.0
STALE_SECONDS = 60.0  # four beats
_LOOK_SECONDS = 2.0
# Between taking it and believing it, where the store has no conditional writes: of two at once, one finds the other.
_SETTLE_SECONDS = 0.5
_RELEASE_SECONDS = 5.0


class LeaseLost(LockstepError):
    """Another process has taken the folder in the bucket."""

    exit_code = 6


class BucketLease:
    """Held from `take` to `release`, or until another process has taken it."""

    def __init__(self, bucket: Bucket, holder: Holder, generation: int) -> None:
        self._bucket, self._holder, self.generation = bucket, holder, generation
        self.token = uuid.uuid4().hex
        self._beats = 0
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat_regularly, name="lockstep-bucket-lease", daemon=True)
        self.lost: LeaseLost | None = None

    @classmethod
    def take(cls, bucket: Bucket, holder: Holder, before: Callable[[str], None]) -> BucketLease:
        """Takes the lease once it is free. Raises ConfigError, naming the holder, if another process renews it.

        `before` gets the token before it is written.
        """
        version, found = _free(bucket)
        last = _decoded(found or b"").get("generation")
        lease = cls(bucket, holder, 1 + (last if isinstance(last, int) else bucket.highest_generation()))
        before(lease.token)
        bucket.replace(LEASE_FILE, lease._encoded(released=False), version)
        time.sleep(_SETTLE_SECONDS)
        now = bucket.read(LEASE_FILE)
        if not lease._is_ours(now):
            raise ConfigError(_refusal(bucket.url, now or b""))
        lease._beating.start()
        return lease

    def check(self) -> None:
        """Raises LeaseLost if another process holds the lease. Called before every change."""
        if self.lost is not None:
            raise self.lost
        found = self._bucket.read(LEASE_FILE)
        if found is None:
            logger.warning("%s/%s is missing: written anew", self._bucket.url, LEASE_FILE)
            self._bucket.replace(LEASE_FILE, self._encoded(released=False), None)
            found = self._bucket.read(LEASE_FILE)
        if not self._is_ours(found):
            who = Holder.decode(found or b"") or "an unknown process"
            self.lost = LeaseLost(
                f"{who} has taken {self._bucket.url} over: this process did not renew its lease for {STALE_SECONDS:g} "
                "s. Nothing more is written there"
            )
            raise self.lost

    def release(self) -> None:
        """Releases it, for a few seconds at most: if that fails, others find that it is stale."""
        self._done.set()
        releasing = threading.Thread(target=self._release, name="lockstep-bucket-lease-end", daemon=True)
        releasing.start()
        releasing.join(_RELEASE_SECONDS)

    def _release(self) -> None:
        with contextlib.suppress(Exception):
            self._renew(released=True)

    def _beat_regularly(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            try:
                self._renew(released=False)
            except LeaseLost:
                return
            except Exception:
                continue  # a service that does not answer now may do so next time

    def _renew(self, released: bool) -> None:
        version = self._bucket.version(LEASE_FILE)
        self.check()
        self._beats += 1
        if released or not self._done.is_set():
            self._bucket.replace(LEASE_FILE, self._encoded(released), version)

    def _encoded(self, released: bool) -> bytes:
        return self._holder.encode(token=self.token, generation=self.generation, beat=self._beats, released=released)

    def _is_ours(self, found: bytes | None) -> bool:
        return _decoded(found or b"").get("token") == self.token


def last_token(bucket: Bucket) -> object:
    """Returns the token of the process that holds the lease, or held it last."""
    return _decoded(bucket.read(LEASE_FILE) or b"").get("token")


def _free(bucket: Bucket) -> tuple[str | None, bytes | None]:
    """Returns the version and content of a lease that may be taken; ConfigError, naming the holder, if it may not."""
    version, found = bucket.version(LEASE_FILE), bucket.read(LEASE_FILE)
    if found is None or _decoded(found).get("released") is True:
        return version, found
    holder = Holder.decode(found)
    if holder is not None and holder.is_here:
        if holder.is_gone:
            return version, found
        raise ConfigError(_refusal(bucket.url, found))
    logger.warning("%s: held by %s; waiting up to %g s to see whether it is still at work", bucket.url,
                   holder or "an unknown process", STALE_SECONDS)  # fmt: skip
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        version, now = bucket.version(LEASE_FILE), bucket.read(LEASE_FILE)
        if now is None or _decoded(now).get("released") is True:
            return version, now
        if now != found:
            raise ConfigError(_refusal(bucket.url, now))
    return version, found


def _decoded(data: bytes) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    return {}


def _refusal(url: Url, found: bytes) -> str:
    who = Holder.decode(found) or "an unknown process"
    return f"{url}: another run is at work in this folder: {who}; wait for it or end it first"
