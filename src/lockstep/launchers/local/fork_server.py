"""The process that ranks are forked from, one for each number of threads: whether it is there, and what it left."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockstep.distributed.signals import QUIET_SIGNALS, end_below, handled, processes_below, state_of, unless_ignored
from lockstep.errors import ConfigError, LaunchError
from lockstep.import_path import safe_interpreters
from lockstep.launchers.local.entry import check_config
from lockstep.terminal import tell

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# How long making the processes of a run may take.
_START_SECONDS = 120.0
# How long the start of ranks may be held up by looking at what a config names.
_CHECK_SECONDS = 15.0

# For how many threads per rank the fork server of this process was started; 0: by somebody else, or not yet.
_threads = 0
# What multiprocessing knows of the servers that were started for other numbers.
_set_aside: dict[int, dict[str, Any]] = {}


def warm_up(threads: int) -> None:
    """Have a fork server for ranks of so many threads: it imports torch once for all, while this process goes on."""
    _change_to(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.launchers.local.preload"])
    # Neither it nor multiprocessing's own helper may go with a signal to the whole process group: the launcher would
    # lose sight of its ranks. They begin with it ignored, as there are seconds before they could say so themselves.
    # And `python -c`, by which they are started, would look for multiprocessing in the current folder first.
    with handled(dict.fromkeys(unless_ignored(QUIET_SIGNALS), signal.SIG_IGN)), safe_interpreters():
        # This process is somebody's: a later run of another number of processes is not to find it there.
        said = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            multiprocessing.resource_tracker.ensure_running()
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ["OMP_NUM_THREADS"]
            if said is not None:
                os.environ["OMP_NUM_THREADS"] = said


def _change_to(threads: int) -> None:
    """One server for each number of threads: libraries read it when they are loaded, which is before a forked process
    could say. It could for its main thread alone: those of gloo, which compute for powerSGD, would go by the server's
    number, and sums of several threads have another order than those of one."""
    global _threads
    if threads == _threads:
        return
    served = vars(multiprocessing.forkserver._forkserver)
    _set_aside[_threads] = {name: each for name, each in served.items() if name != "_lock"}
    served.update(_set_aside.pop(threads) if threads in _set_aside else _never_started())
    _threads = threads


def _never_started() -> dict[str, Any]:
    return {name: each for name, each in vars(multiprocessing.forkserver.ForkServer()).items() if name != "_lock"}


def check(config: RunConfig) -> None:
    """Raise ConfigError where a config names what its task does not have: a child of the fork server, which has torch,
    looks before any rank is started. One that takes long, or falls, tells nothing: the ranks will."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=check_config, args=(theirs, config), name="lockstep-check", daemon=True)
    server, problem = ForkServer(), None
    try:
        server.start(process.start)
        theirs.close()
        with suppress(EOFError, OSError):
            problem = ours.recv() if ours.poll(_CHECK_SECONDS) else None
    finally:
        if process.pid is not None:
            process.kill()
            process.join(_CHECK_SECONDS)
        ours.close()
        server.end_what_is_left()
    if problem is not None:
        raise ConfigError(problem)


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
