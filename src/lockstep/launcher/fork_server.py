"""The process that ranks are forked from: whether it is there, and what is left below it."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from lockstep.distributed.descendants import end_below, processes_below, state_of
from lockstep.errors import LaunchError
from lockstep.terminal import tell

# How long making the processes of a run may take.
_START_SECONDS = 120.0


class ForkServer:
    """The fork server of this process, as one attempt sees it. Only Linux tells anything about it."""

    def __init__(self) -> None:
        self._others: set[int] = set()

    @property
    def pid(self) -> int | None:
        return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)

    def start(self, make: Callable[[], None]) -> None:
        """Have it make processes, from another thread; it may be stopped, or gone, and would then never answer."""
        self._others = set(processes_below([self.pid])) if self.pid else set()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                make()
            except BaseException as error:  # raised again below
                failures.append(error)

        thread = threading.Thread(target=run, name="lockstep-start", daemon=True)
        thread.start()
        waited = 0.0
        while thread.is_alive():
            thread.join(0.5)
            waited += 0.5
            self.go_on()
            if waited > _START_SECONDS:
                raise LaunchError(
                    f"the fork server (pid {self.pid}) did not make the processes of the run within "
                    f"{_START_SECONDS:g} s: it hangs, or the machine is overloaded. `lockstep doctor` looks for what "
                    "is wrong"
                )
        if failures and self.is_gone and isinstance(failures[0], (OSError, EOFError)):
            raise LaunchError(
                f"the fork server (pid {self.pid}) went away while it made the processes of the run: it was killed "
                "(out of memory? see the kernel log)"
            )
        if failures:
            raise failures[0]

    def go_on(self) -> None:
        """Where somebody has stopped it, say so and let it go on: without it, nothing is heard of ranks that end."""
        if self.pid is not None and state_of(self.pid) == "T":
            tell(f"lockstep: the fork server (pid {self.pid}) was stopped by a signal (SIGSTOP): it is told to go on")
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    @property
    def is_gone(self) -> bool:
        return sys.platform == "linux" and self.pid is not None and state_of(self.pid) in (None, "Z")

    def end_what_is_left(self) -> None:
        """End every process below it that this attempt brought there."""
        if self.pid is not None:
            end_below([self.pid], spare=self._others)
