"""What runs inside a started process: a command, or a function, with its failure written down for the launcher.

Imported by the fork server before any process is made, so that all of them share one import of torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import report, stop_file
from lockstep.distributed.group import settle
from lockstep.distributed.signals import end_below, nothing
from lockstep.distributed.topology import Topology
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError
from lockstep.launchers.local.entry import Outcome
from lockstep.launchers.local.exit import leave
from lockstep.tasks.config_checks import CannotImport, check_made, check_parts
from lockstep.terminal import make_safe

logger = logging.getLogger(__name__)

# How long a process may take to save and leave once its launcher is gone.
_ORPHAN_SECONDS = 60.0
_GRACEFUL = (None, 0, PREEMPTED_EXIT_CODE)


def run_rank(
    index: int,
    entry: Callable[[Any], Any],
    arguments: Sequence[Any],
    envs: Sequence[Mapping[str, str]],
    error_files: Sequence[str],
    outcomes: Sequence[Any],
    all_returned: Event,
    ignored: Sequence[int],
) -> None:
    """One process from its first line to its last: what it came to goes to the launcher before it leaves.

    `ignored` are signals that the launcher was started to ignore.
    """
    os.environ.update(envs[index])
    error_file = Path(error_files[index])
    parent, exit_code = _Parent(), 1
    try:
        with _writing_failure(error_file):
            _become_a_process_of_its_own(error_file, ignored)
            if len(envs) == 1:
                _read_from_the_terminal()
            outcome = _outcome(entry, arguments[index])
            if not parent.gone():
                outcomes[index].put(outcome)
        exit_code = 0
    except SystemExit as leaving:
        exit_code = leaving.code if isinstance(leaving.code, int) else 1
        raise
    finally:
        leave(index, exit_code, error_file)
        parent.work_is_done()
    # Its connections stay until all are done: who waits for a rank that has left is told so, and not that it fell.
    all_returned.wait()


def run_command(argv: tuple[str, ...]) -> None:
    """Run `python script.py ...` or `python -m module ...` in this process."""
    _make_leaving_safe()
    _run_python(argv)


_CHECK_SECONDS = 30


def check_config(connection: Connection, config: RunConfig) -> None:
    """Send what is wrong with what a config names, or None. Its own output is not shown: ranks import the same."""
    signal.alarm(_CHECK_SECONDS)  # also where the launcher is gone
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    problem = None
    try:
        check_parts(config, (CannotImport,))  # what fails while it is imported has a traceback, which ranks show
        check_made(config)
    except ConfigError as error:
        problem = str(error)
    finally:
        connection.send(problem)
        os._exit(0)


def call_function(pickled: bytes) -> Any:
    """Call a function that our own launcher pickled a moment ago."""
    return pickle.loads(pickled)()


def _outcome(entry: Callable[[Any], Any], argument: Any) -> Outcome:
    try:
        return Outcome.of(entry(argument))
    except SystemExit as leaving:
        if leaving.code in _GRACEFUL:
            return Outcome(exit_code=int(leaving.code or 0))
        raise


def _become_a_process_of_its_own(error_file: Path, ignored: Sequence[int]) -> None:
    """Undo what is right for the fork server alone. A request to save, or to write down stacks, that comes before the
    rank listens must not end it, as it would by default."""
    make_safe()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if Topology.from_env(os.environ).watched:
        # A rank of ours leaves the terminal to the launcher from its first moment on; a script does as it likes.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
            signal.signal(number, nothing)
    if stop_file(error_file).exists():
        os.kill(os.getpid(), signal.SIGTERM)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the launcher says it in our words
    # What this process starts itself (data workers) is started in the platform's usual way, not by a fork server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _read_from_the_terminal() -> None:
    """A process that is alone has the launcher's input to itself, for a debugger or a pipe: elsewhere it is empty."""
    with contextlib.suppress(OSError):  # a launcher that was started without any
        sys.stdin = open(0, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _writing_failure(error_file: Path) -> Iterator[None]:
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        report(error, int(os.environ.get("RANK", "0")), socket.gethostname()).write(error_file)
        raise


def _make_leaving_safe() -> None:
    """A script that takes its group apart right after a step would now and then wait for ever (see group.settle)."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def settle_and_destroy(*args: Any, **kwargs: Any) -> None:
        settle()
        destroy(*args, **kwargs)

    dist.destroy_process_group = settle_and_destroy


def _run_python(argv: tuple[str, ...]) -> None:
    """As `python` does: what it runs is `__main__` until the process is gone, also for its threads and handlers."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[1] == "-P":
        argv = argv[1:]
    elif argv[1] == "-m":
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    if argv[1] == "-m":
        sys.argv = list(argv[2:])
        runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]
        return
    sys.argv = list(argv[1:])
    if zipfile.is_zipfile(argv[1]):
        sys.path.insert(0, argv[1])
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    script = Path(argv[1])
    sys.path.insert(0, str(script.resolve().parent))
    main.__file__ = str(script.absolute())
    exec(compile(script.read_bytes(), argv[1], "exec"), main.__dict__)


class _Parent:
    """Ends this process when its launcher is gone, however it went: in order if it can, and in any case in time."""

    def __init__(self) -> None:
        # The launcher, not the fork server, which lives on while any of its children does.
        self._launcher = multiprocessing.parent_process()
        self._done = False
        threading.Thread(target=self._watch, name="lockstep-parent", daemon=True).start()

    def gone(self) -> bool:
        return self._launcher is not None and not self._launcher.is_alive()

    def work_is_done(self) -> None:
        """From here on there is nothing to save: without a launcher to report to, leave at once."""
        self._done = True
        if self.gone():
            end_below([os.getpid()])
            os._exit(1)

    def _watch(self) -> None:
        while not self.gone():
            time.sleep(0.5)
        if not self._done:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + _ORPHAN_SECONDS
            while not self._done and time.monotonic() < deadline:
                time.sleep(0.1)
        end_below([os.getpid()])
        os._exit(1)
