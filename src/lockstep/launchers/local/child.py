"""What runs inside a started process: a command or a function, with its failure written down for the launcher.

The launcher imports this module without torch. The fork server imports it, and torch, before it makes any process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from lockstep.distributed.failure import report
from lockstep.distributed.signals import end_below, nothing
from lockstep.distributed.watch.heartbeat import user_line
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError
from lockstep.runtime import set_variables
from lockstep.terminal import make_safe

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# How long a rank may take to leave once its work is done: threads, atexit handlers, buffers.
LEAVE_SECONDS = 30.0
# How long a process may take to save and leave once its launcher is gone.
_ORPHAN_SECONDS = 60.0
_CHECK_SECONDS = 30
_LENGTH_BYTES = 8  # before every message to the launcher
_GRACEFUL = (None, 0, PREEMPTED_EXIT_CODE)
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_NOTHING = pickle.dumps(None)


@dataclass(frozen=True)
class Outcome:
    """The exit code of a process that ended in order, and the pickled return value of its function."""

    exit_code: int = 0
    value: bytes = _NOTHING
    kind: str = "NoneType"
    error: str = ""  # why the value could not be pickled

    @classmethod
    def of(cls, value: Any) -> Outcome:
        """Pickles a return value. The work is done by now, so a value that cannot be pickled is no failure."""
        kind = type(value).__qualname__
        if type(value).__module__ != "builtins":
            kind = f"{type(value).__module__}.{kind}"
        try:
            return cls(value=pickle.dumps(value), kind=kind)
        except Exception as error:
            return cls(kind=kind, error=_first_line(error))

    def received(self, rank: int, warn: Callable[[str], None]) -> Any:
        """Returns the value, or None with a warning where it cannot be pickled or unpickled."""
        problem = self.error
        try:
            if not problem:
                return pickle.loads(self.value)
        except Exception as error:
            problem = _first_line(error)
        warn(
            f"rank {rank} returned a {self.kind}, which cannot be sent to the launcher ({problem}). The run is "
            "complete, and None is returned for this rank. Return plain data or tensors, or save the object in "
            "run.folder"
        )
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def run_rank(*arguments: Any) -> None:
    """The target of every process from the fork server; failures are sent to the launcher and not printed here."""
    try:
        _run_rank(*arguments)
    except (Exception, KeyboardInterrupt):
        sys.exit(1)


def _run_rank(
    rank: int,
    alone: bool,
    entry: Callable[[Any], Any],
    argument: Any,
    env: Mapping[str, str | None],
    channel: socket.socket,
    ignored: Sequence[int],
) -> None:
    """Sends its outcome to the launcher before it leaves. `ignored` are signals that the launcher ignores."""
    set_variables(env)
    channel.settimeout(None)  # the user's file, which is imported before, may set another default
    parent, exit_code = _Parent(), 1
    try:
        with _sending_failure(channel):
            _set_up_process(channel, ignored)
            if alone:
                _open_stdin()
            _send(channel, "returned", _outcome(entry, argument))
        exit_code = 0
    except SystemExit as leaving:
        exit_code = leaving.code if isinstance(leaving.code, int) else 1
        raise
    finally:
        _leave(rank, exit_code, channel)
        parent.work_is_done()
    # Its connections stay open until all ranks are done, so that nobody takes a rank that has left for a failed one.
    with contextlib.suppress(OSError):
        while channel.recv(64):
            pass


def _send(channel: socket.socket, kind: str, content: Any = None) -> None:
    message = pickle.dumps((kind, content))
    with contextlib.suppress(OSError):  # the launcher is gone
        channel.sendall(len(message).to_bytes(_LENGTH_BYTES) + message)


def take_message(received: bytearray) -> tuple[str, Any] | None:
    """Removes and returns the first message that a rank has sent, or None where it is not whole."""
    end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES])
    if len(received) < end:
        return None
    message: tuple[str, Any] = pickle.loads(received[_LENGTH_BYTES:end])
    del received[:end]
    return message


def run_command(argv: tuple[str, ...]) -> None:
    """Runs `python -P -m module ...` in this process: it is `__main__` until the end, for threads and handlers too."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = list(argv[3:])
    runpy._run_module_as_main(argv[3])  # type: ignore[attr-defined]


def check_config(connection: Connection, config: RunConfig, elsewhere: bool, env: Mapping[str, str | None]) -> None:
    """Sends what is wrong with the names in a config, and what could not be checked."""
    from lockstep.tasks.config_checks import ELSEWHERE, CannotImport, check_made, check_parts

    set_variables(env)
    signal.alarm(_CHECK_SECONDS)  # also where the launcher is gone
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):  # the ranks import the same, and show what it prints
        os.dup2(nowhere, number)
    problem, passed_over = "", []
    try:
        # Ranks show the traceback of what fails while it is imported.
        passed_over = check_parts(config, ELSEWHERE if elsewhere else (CannotImport,))
        check_made(config)
    except ConfigError as error:
        problem = str(error)
    finally:
        connection.send((problem, passed_over[0] if passed_over else ""))
        os._exit(0)


def call_function(given: tuple[Any, ...]) -> Any:
    """Calls a function that our launcher pickled a moment ago, with the arguments behind it."""
    pickled, *arguments = given
    return pickle.loads(pickled)(*arguments)


def _outcome(entry: Callable[[Any], Any], argument: Any) -> Outcome:
    try:
        return Outcome.of(entry(argument))
    except SystemExit as leaving:
        if leaving.code in _GRACEFUL:
            return Outcome(exit_code=int(leaving.code or 0))
        raise


def _set_up_process(channel: socket.socket, ignored: Sequence[int]) -> None:
    """Undoes what is right for the fork server alone. Signals that come before a rank listens must not end it."""
    import torch

    make_safe()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if signal.SIGTERM in ignored else signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
        signal.signal(number, nothing)  # ranks leave signals of the terminal to the launcher
    with contextlib.suppress(BlockingIOError):  # no request to stop was sent yet
        channel.recv(1, socket.MSG_DONTWAIT)
        os.kill(os.getpid(), signal.SIGTERM)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the launcher reports failures
    # Processes that a rank starts itself (data workers) do not come from a fork server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _open_stdin() -> None:
    """Gives the launcher's input to its only process, for a debugger or a pipe; multiprocessing has closed it."""
    with contextlib.suppress(OSError):  # a launcher that was started without any
        sys.stdin = open(0, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _sending_failure(channel: socket.socket) -> Iterator[None]:
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _send(channel, "failed", report(error, int(os.environ.get("RANK", "0")), socket.gethostname()))
        raise


def _leave(rank: int, exit_code: int, channel: socket.socket) -> None:
    """Does what Python does at the end of a process, which a forked one leaves out; ends it where that takes long."""
    _send(channel, "leaving")
    for number in (signal.SIGTERM, signal.SIGINT):
        # The launcher may ask to stop although the work is done. A function, since SIG_IGN would be inherited.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda *_: None)
    limit = threading.Timer(LEAVE_SECONDS, _end_late, (rank, exit_code, channel, threading.get_ident()))
    limit.daemon = True
    limit.start()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _write_buffers()
    limit.cancel()


def _end_late(rank: int, exit_code: int, channel: socket.socket, main_thread: int) -> None:
    where = user_line(sys._current_frames().get(main_thread))
    waited = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    threads = ", ".join(sorted(each.name for each in waited))
    text = (
        f"rank {rank} was still at {where} {LEAVE_SECONDS:g} s after the end of its work, so that it was ended there "
        f"({f'it waited for its threads: {threads}' if threads else 'an atexit handler, or a process that it started'})"
    )
    _send(channel, "late", text)
    os._exit(exit_code)


def _write_buffers() -> None:
    """Flushes files that were never closed, as the end of an interpreter does."""
    for each in gc.get_objects():  # what was there before the fork is frozen, and not among them
        if issubclass(type(each), _BUFFERED) and not each.closed:
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what native code has printed


class _Parent:
    """Ends this process when its launcher is gone: in order if it can, and in any case in time."""

    def __init__(self) -> None:
        # The launcher, not the fork server, which lives on while any of its children does.
        self._launcher = multiprocessing.parent_process()
        self._done = False
        threading.Thread(target=self._watch, name="lockstep-parent", daemon=True).start()

    def gone(self) -> bool:
        return self._launcher is not None and not self._launcher.is_alive()

    def work_is_done(self) -> None:
        """From here on there is nothing to save: without a launcher, leave at once."""
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
