"""The process that ranks are forked from, one for each number of threads."""

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
from lockstep.launchers.local.child import check_config

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# How long making the processes of a run may take.
_START_SECONDS = 120.0
# How long checking the names in a config may delay the start of ranks.
_CHECK_SECONDS = 15.0

# The number of threads per rank that the fork server was started for; 0: started by other code, or not yet.
_threads = 0
# The state of multiprocessing for the servers that were started for other numbers, and the process ids of ours.
_set_aside, _started = dict[int, dict[str, Any]](), dict[int, int | None]()


def warm_up(threads: int) -> None:
    """Starts a fork server for ranks of so many threads: it imports torch once for all, in the background."""
    _change_to(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.launchers.local.preload"])
    # A signal to the whole process group must end neither it nor multiprocessing's resource tracker, so both start with
    # it ignored. And `python -c`, which starts them, would look for multiprocessing in the current folder first.
    with handled(dict.fromkeys(unless_ignored(QUIET_SIGNALS), signal.SIG_IGN)), safe_interpreters():
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            multiprocessing.resource_tracker.ensure_running()
            multiprocessing.forkserver.ensure_running()
            _started[threads] = ForkServer().pid
        finally:
            del os.environ["OMP_NUM_THREADS"]
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before


def _change_to(threads: int) -> None:
    """Libraries read the number of threads when they are loaded; a forked process could change it for its main thread
    alone. Threads of gloo, which compute too, would keep the server's, and the order of sums depends on it."""
    global _threads
    served = vars(multiprocessing.forkserver._forkserver)
    if served["_forkserver_pid"] not in (None, _started.get(_threads)):
        _threads = 0  # of other code, since ours ended
    if threads == _threads:
        return
    _set_aside[_threads] = {name: each for name, each in served.items() if name != "_lock"}
    new = {name: each for name, each in vars(multiprocessing.forkserver.ForkServer()).items() if name != "_lock"}
    served.update(_set_aside.pop(threads, new))
    _threads = threads


def check(config: RunConfig, elsewhere: bool = False) -> str:
    """Raises ConfigError where a config names what its task does not have, by a child of the fork server.

    Returns what was not checked, which the ranks will report; with `elsewhere`, they may have what is missing here.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=check_config, args=(theirs, config, elsewhere), name="lockstep-check", daemon=True)
    server, answer = ForkServer(), ("", f"importing the task took longer than {_CHECK_SECONDS:g} s, or failed")
    try:
        server.start(process.start)
        theirs.close()
        with suppress(EOFError, OSError):
            answer = ours.recv() if ours.poll(_CHECK_SECONDS) else answer
    finally:
        if process.pid is not None:
            process.kill()
            process.join(_CHECK_SECONDS)
        ours.close()
        server.end_what_is_left()
    problem, not_checked = answer
    if problem:
        raise ConfigError(problem)
    return not_checked


def stop() -> None:
    """Ends the fork server, where no ranks will be started by it."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


class ForkServer:
    """The fork server of this process in one attempt. Only Linux shows the state of its process."""

    def __init__(self) -> None:
        self._others: set[int] = set()

    @property
    def pid(self) -> int | None:
        return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)

    def start(self, make: Callable[[], None]) -> None:
        """Makes processes in another thread: a server that is stopped, or gone, would never answer."""
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

    @property
    def is_gone(self) -> bool:
        return sys.platform == "linux" and self.pid is not None and state_of(self.pid) in (None, "Z")

    def end_what_is_left(self) -> None:
        """Ends every process below it that this attempt started."""
        if self.pid is not None:
            end_below([self.pid], spare=self._others)
