"""Writes one checkpoint at a time, while training waits or beside it; within a limit, since a disk may never answer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError

# What a rank gets beyond its own limit, so that it is the one to say what held it up.
_TELL_SECONDS = 30.0
# How long a rank that failed waits for the write under way: less than its launcher gives it to end by itself.
_GIVE_UP_SECONDS = 3.0


class Background:
    """The write that is under way, if there is one."""

    def __init__(self, folder: Path, limit: float, activity: Activity) -> None:
        """`limit` is the longest that a save may hold up the next one, or the end of the run."""
        self._folder, self._limit, self._activity = folder, limit, activity
        self._writing: concurrent.futures.Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """In a thread that does not hold up the end of the process."""
        writing: concurrent.futures.Future[None] = concurrent.futures.Future()

        def work() -> None:
            try:
                write()
            except BaseException as error:
                writing.set_exception(error)
            else:
                writing.set_result(None)

        threading.Thread(target=work, name="lockstep-checkpoint", daemon=True).start()
        self._writing = writing

    def check(self) -> None:
        """Raise what a background write raised, as soon as it is known."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the write under way; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            with self.within_limit():
                writing.result(timeout=self._limit)
        except concurrent.futures.TimeoutError:
            raise CheckpointError(
                f"{self._folder}: writing a checkpoint has taken more than {self._limit:g} s; "
                "the disk or the network file system does not answer. timeouts.checkpoint sets the limit"
            ) from None

    def give_up(self) -> None:
        """Let a write under way come to its end, in a run that failed: within seconds, and whatever becomes of it."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing], timeout=min(self._limit, _GIVE_UP_SECONDS))

    def within_limit(self) -> contextlib.AbstractContextManager[None]:
        return self._activity.within("writing a checkpoint", limit=self._limit + _TELL_SECONDS)


class WritesInBackground:
    """What every writer of checkpoints lets a run do with the write under way."""

    store: CheckpointStorage
    _background: Background
    _before_the_first: Callable[[], Any] | None

    def _write_and_tidy(self, write: Callable[[], None], tidy: Callable[[], None], wait: bool) -> None:
        """Write, beside training or while it waits; and then delete what need not be kept, for which it never waits:
        a disk may take as long for that as for writing."""
        if wait:
            write()
            self._background.start(tidy)
            return

        def both() -> None:
            write()
            tidy()

        self._background.start(both)

    def go_on_from(self, step: int | None) -> None:
        """The run was restored from this step, or begins anew: its first save sets aside what is newer than that."""
        self._before_the_first = functools.partial(self.store.set_aside_after, step)

    def check(self) -> None:
        """Raise what a background write raised, as soon as it is known."""
        self._background.check()

    def finish(self) -> None:
        """Wait for the write under way; raises what it raised."""
        self._background.finish()

    def give_up(self) -> None:
        """Let a write under way come to its end, in a run that failed: within seconds, and whatever becomes of it."""
        self._background.give_up()
