"""Requests to stop or to save, as one rank receives them; the control sync makes them known to all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType

from lockstep.distributed.signals import handled, interactive, nothing, unless_ignored
from lockstep.distributed.watch.heartbeat import user_line
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, RankLeft

# Two signals closer together than this are one request: a terminal and a launcher may both deliver it.
SAME_REQUEST_SECONDS = 1.0


class Preempted(SystemExit):
    """Raised on every rank at the same step boundary, after the run was saved; not for user code to catch."""

    def __init__(self, reason: str) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.reason = reason


class Interrupted(SystemExit):
    """Raised where a process is asked to stop before its first step: nothing has changed that could be saved."""

    def __init__(self, reason: str) -> None:
        super().__init__(INTERRUPTED_EXIT_CODE)
        self.reason = reason


class StopRequests:
    """What this process was asked for: to save and leave, to save and continue, or (by user code) to end training.

    The first request to leave counts. Ctrl-C a while later ends the process at once (in a notebook, the cell).
    """

    def __init__(self) -> None:
        self.leave: str | None = None
        self.stop: str | None = None
        self.save = False
        self.begun = False  # whether this process has made a step: before, it leaves as it is
        self._since = 0.0
        self._launched = self._alone = False

    @property
    def any(self) -> bool:
        return self.save or self.leave is not None or self.stop is not None

    def ask_to_save(self) -> None:
        self.save = True

    def listening(self, launched: bool, alone: bool = False) -> AbstractContextManager[None]:
        """Listens to signals. Under our launcher, the terminal is the launcher's, also when it hangs up: it sends
        SIGTERM, and ends ranks that do not follow. A process that is `alone` leaves nobody waiting."""
        self._launched, self._alone = launched, alone
        terminal = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if launched:
            return handled(
                {
                    **dict.fromkeys((signal.SIGTERM, signal.SIGUSR1), self._received),
                    **dict.fromkeys((*terminal, signal.SIGXCPU), nothing),
                }
            )
        asking = (signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU, *unless_ignored(terminal))
        return handled(dict.fromkeys(asking, self._received))

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif self.leave is None:
            self.leave, self._since = signal.Signals(number).name, now
            if self._alone and not self.begun:
                raise KeyboardInterrupt if interactive() else Interrupted(self.leave)
        elif not self._launched and number == signal.SIGINT and now - self._since > SAME_REQUEST_SECONDS:
            if interactive():
                raise KeyboardInterrupt
            os._exit(INTERRUPTED_EXIT_CODE)


@contextlib.contextmanager
def exit_is_failure() -> Iterator[None]:
    """Turns sys.exit() in user code into an error: the other ranks would wait for this one."""
    try:
        yield
    except (Preempted, Interrupted):
        raise
    except SystemExit as leaving:
        entry = leaving.__traceback__
        while entry is not None and entry.tb_next is not None:
            entry = entry.tb_next
        where = user_line(entry.tb_frame) if entry is not None else "?"
        code = "" if leaving.code is None else repr(leaving.code)
        raise RankLeft(
            f"sys.exit({code}) was called at {where}, before the work was done: the other ranks would wait for this "
            "one. Return from the function instead; run.stop(reason) ends training on all ranks"
        ) from None
