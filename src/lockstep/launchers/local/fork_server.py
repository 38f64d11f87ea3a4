"""The process that ranks are forked from, which has imported torch."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.distributed.signals import QUIET_SIGNALS, end_below, handled, processes_below, state_of, unless_ignored
from lockstep.errors import ConfigError, LaunchError
from lockstep.import_path import safe_interpreters
from lockstep.launchers.local.child import check_config
from lockstep.runtime import with_variables

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# How long making the processes of a run may take.
_START_SECONDS = 120.0
# How long checking the names in a config may delay the start of ranks.
_CHECK_SECONDS = 15.0

# Variables that torch and its libraries read while they are loaded. A forked process could change the number of threads
# for its main thread alone: those of gloo, which compute too, would keep the server's, and the order of sums depends on
# it.
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_")

# The process id and the environment of the server that was started here; one of other code is left alone.
_started: tuple[int | None, Mapping[str, str]] = (None, {})


def warm_up(threads: int) -> None:
    """Starts a fork server for ranks of so many threads: it imports torch once for all, in the background."""
    global _started
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = ForkServer()
    if server.pid != _started[0] or _read_at_import(environment) != _read_at_import(_started[1]):
        stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.launchers.local.preload"])
    # A signal to the whole process group must end neither it nor multiprocessing's resource tracker, so both start with
    # it ignored. And `python -c`, which starts them, would look for multiprocessing in the current folder first.
    ignored = dict.fromkeys(unless_ignored(QUIET_SIGNALS), signal.SIG_IGN)
    with handled(ignored), safe_interpreters(), with_variables({"OMP_NUM_THREADS": str(threads)}):
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()
    if server.pid != _started[0]:
        _started = (server.pid, environment)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}


def changes() -> dict[str, str | None]:
    """Returns the variables that were set, or removed (None), since the server was started."""
    before = _started[1]
    return {name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}


def stop() -> None:
    """Lets go of the fork server. Ours ends with the last process that it made; one of other code lives on."""
    served = vars(multiprocessing.forkserver._forkserver)
    if served["_forkserver_pid"] is not None and served["_forkserver_pid"] == _started[0]:
        os.close(served["_forkserver_alive_fd"])
    none = vars(multiprocessing.forkserver.ForkServer())
    served.update({name: each for name, each in none.items() if name != "_lock"})


def check(config: RunConfig, elsewhere: bool = False) -> str:
    """Raises ConfigError where a config names what its task does not have, by a child of the fork server.

    Returns what was not checked, which the ranks will report; with `elsewhere`, they may have what is missing here.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    given = (theirs, config, elsewhere, changes())
    process = context.Process(target=check_config, args=given, name="lockstep-check", daemon=True)
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
