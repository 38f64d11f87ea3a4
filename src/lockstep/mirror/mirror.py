"""Keeps a run's folder in a bucket like the one on this host's disk, while a run is at work in it.

Whoever holds the folder does this: the launcher or, where nobody of ours has started the ranks, rank 0. A thread
uploads; training never waits for it, but for its last save. What fails is reported, and tried again until it succeeds
or the run is over: then the exit code says that the bucket is behind.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.config.schema import Keep, RunSettings
from lockstep.errors import PREEMPTED_EXIT_CODE, BucketBehind, ConfigError, FolderLost
from lockstep.mirror.bucket import Bucket, cannot_be_used, said
from lockstep.mirror.lease import BucketLease, LeaseLost, last_token
from lockstep.mirror.mark import MARK_FILE, Mark
from lockstep.mirror.uploads import NotSent, Uploads
from lockstep.record.folder_lease import Holder

logger = logging.getLogger(__name__)

Tell = Callable[[str], object]

_INTERVAL = 1.0
# How often a file that grows (a log, the metrics) is sent again: a bucket takes whole objects only.
_FILE_SECONDS = 10.0
_RETRY_SECONDS = 3.0
_ATTEMPT_SECONDS = 60.0  # the longest wait for a save that training continues after
_REPEAT_SECONDS = 60.0  # between two warnings of the same
_AFTER_FAILURE_SECONDS = 20.0  # for what a run that failed, or was ended, still has to upload


@contextlib.contextmanager
def mirrored_by(mark: Mark, folder: Path, settings: RunSettings, tell: Tell) -> Iterator[Mirror]:
    """See mark.mirrored."""
    mirror = Mirror.begin(folder, mark, settings, tell)
    try:
        yield mirror
        mirror.require(settings.timeouts.checkpoint)
    except SystemExit as leaving:
        if leaving.code in (0, None, PREEMPTED_EXIT_CODE):
            mirror.require(settings.timeouts.stop)
        mirror.finish(_AFTER_FAILURE_SECONDS)
        raise
    except BucketBehind:
        raise
    except BaseException:
        mirror.finish(_AFTER_FAILURE_SECONDS)
        raise
    finally:
        mirror.close()


class Mirror:
    """One folder and its copy in a bucket, from `begin` to `close`."""

    def __init__(self, folder: Path, bucket: Bucket, lease: BucketLease, keep: Keep, tell: Tell) -> None:
        self.folder, self.url = folder, bucket.url
        self._lease, self._tell = lease, tell
        self._uploads = Uploads(bucket, folder, keep, lambda text: tell(f"{bucket.url}: {text}"))
        self._asked = self._tried = self._succeeded = 0  # numbers of requests
        self._last: int | None = None  # the request to upload everything, at the end
        self._closed = False
        self._news = threading.Condition()
        self._failure: str | None = None
        self._fatal: LeaseLost | FolderLost | None = None
        self._told_at = float("-inf")
        self._thread = threading.Thread(target=self._work, name="lockstep-mirror", daemon=True)
        self._thread.start()

    @classmethod
    def begin(cls, folder: Path, mark: Mark, settings: RunSettings, tell: Tell) -> Mirror:
        """Takes the folder in the bucket for this run; ConfigError if another run has it, or it cannot be used."""
        lease = None
        try:
            last = last_token(bucket := Bucket(mark.url))
            if mark.tokens and last is not None and last not in mark.tokens:
                raise ConfigError(
                    f"{folder}: {mark.url} was written by another host since this copy of it: resume what is there "
                    f"by `lockstep resume {mark.url}`. To resume this copy by itself, delete {MARK_FILE} in it"
                )
            lease = BucketLease.take(bucket, Holder("its writer"), lambda token: _note(folder, mark, token))
            return cls(folder, Bucket(mark.url, lease), lease, settings.checkpoint.keep, tell)
        except Exception as error:
            if lease is not None:
                lease.release()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{cannot_be_used(mark.url, 'the run is kept in', 'written', error)}. All that is known of the run "
                f"here is in {folder}; without its {MARK_FILE} it is a folder like any other, to resume by itself"
            ) from None

    def follow_branch(self) -> None:
        """See Uploads.follow_branch."""
        self._uploads.follow_branch()

    def settle(self, limit: float | None = None) -> None:
        """Waits until what was saved before this call is in the bucket; without a limit, for one attempt."""
        self._wait(_ATTEMPT_SECONDS if limit is None else limit, urgent=limit is not None)

    def finish(self, limit: float) -> str | None:
        """Uploads everything, for so many seconds; returns a message if something did not arrive."""
        if self._last is None:
            with self._news:
                self._last = self._asked + 1
            self._wait(limit, urgent=True)
        return None if self._succeeded >= self._last else self._behind(limit)

    def require(self, limit: float) -> None:
        """Like `finish`, and raises BucketBehind."""
        behind = self.finish(limit)
        if behind is not None:
            raise BucketBehind(behind)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._asked += 1
            self._news.notify_all()
        self._lease.release()

    # The thread

    def _work(self) -> None:
        with contextlib.closing(self._uploads):
            self._push_regularly()

    def _push_regularly(self) -> None:
        delay = _INTERVAL
        while True:
            with self._news:
                self._news.wait_for(lambda: self._asked > self._tried, timeout=delay)
                if self._closed:
                    return
                asked, last = self._asked, self._last
            error = self._attempt(_FILE_SECONDS if last is None else 0.0)
            with self._news:
                self._tried = asked
                if error is None:
                    self._succeeded = asked
                self._news.notify_all()
            if self._fatal is not None or (error is None and last is not None and asked >= last):
                return
            delay = _INTERVAL if error is None else _RETRY_SECONDS

    def _attempt(self, at_most_every: float) -> BaseException | None:
        try:
            if self._lease.lost is not None:
                raise self._lease.lost
            self._uploads.push(at_most_every)
        except (LeaseLost, FolderLost) as error:
            self._fatal = error
            self._tell(str(error))
            return error
        except Exception as error:
            self._failed(error)
            return error
        if self._failure is not None:
            self._failure = None
            self._tell(f"{self.url} can be written again, and has everything up to now")
        return None

    def _failed(self, error: Exception) -> None:
        self._failure, now = said(error), time.monotonic()
        if isinstance(error, NotSent) and error.__cause__ is not None:
            self._failure = f"{error}: {said(error.__cause__)}"
        if now - self._told_at > _REPEAT_SECONDS:
            self._told_at = now
            self._tell(
                f"{self.url} cannot be written: {self._failure}. Training continues; what is not there is kept in "
                f"{self.folder}, and is tried again"
            )

    # Inside

    def _wait(self, limit: float, urgent: bool) -> None:
        deadline = time.monotonic() + limit
        with self._news:
            self._asked += 1
            number = self._asked
            self._news.notify_all()
            while self._thread.is_alive() and (self._succeeded if urgent else self._tried) < number:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._news.wait(min(left, 1.0))

    def _behind(self, limit: float) -> str:
        if isinstance(self._fatal, FolderLost):
            return f"{self._fatal}. What {self.url} has is whole: resume it with: lockstep resume {self.url}"
        if self._fatal is not None:
            return (
                f"{self._fatal}; what this run made since is in {self.folder} alone. Go on with what is there: "
                f"lockstep resume {self.url}. To resume this copy instead, delete {MARK_FILE} in it and resume it"
            )
        missing = [self._uploads.storage.path(step).name for step in self._uploads.storage.steps()
                   if step not in self._uploads.there]  # fmt: skip
        what = ", ".join(missing) or "the newest of its logs and metrics"
        why = self._failure or f"it was not done within {limit:g} s"
        return (
            f"{self.url} is behind: {what} did not get there ({why}). Nothing is lost: all of it is in {self.folder}. "
            "Go on from here, which brings the bucket up to date, with: "
            f"lockstep resume {shlex.quote(str(self.folder))}"
        )


def _note(folder: Path, mark: Mark, token: str) -> None:
    """Runs before the lease is written: whichever is written last, this folder is known to be the newest."""
    Mark(mark.url, (*mark.tokens[-1:], token)).write(folder)
