"""The end of a rank from the fork server: what Python does at the end of a process, which a forked one leaves out.

Its threads come to their end, its atexit handlers run (a tracker sends the last of its numbers in one), and what it
has not written yet is written: within a limit, since nothing of this may hold up the run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from lockstep.distributed.watch.heartbeat import user_line

# How long all of it may take.
LEAVE_SECONDS = 30.0
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def leaving_file(error_file: Path) -> Path:
    """There from when the work of a rank is done: what it still does is its own affair, and gets its time."""
    return error_file.with_name(f"leaving-{error_file.stem}")


def late_file(error_file: Path) -> Path:
    """What a rank was still at when its time to leave was over."""
    return error_file.with_name(f"late-{error_file.stem}")


def leave(rank: int, exit_code: int, error_file: Path) -> None:
    """Do what Python does at the end of a process. Where that takes too long, the process ends with the exit code."""
    with contextlib.suppress(OSError):  # where the launcher is gone, so is its folder
        leaving_file(error_file).touch()
    _keep_the_launchers_signals_away()
    limit = threading.Timer(LEAVE_SECONDS, _end, (rank, exit_code, error_file, threading.get_ident()))
    limit.daemon = True
    limit.start()
    # In the interpreter's own order. Handlers that libraries registered before the fork are among those that run: a
    # process that had imported these libraries itself would run them too.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _write_buffers()
    limit.cancel()


def _keep_the_launchers_signals_away() -> None:
    """It asks ranks to stop whose work is done already; a second request comes as SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            # A function, and not SIG_IGN, which the programs that a handler starts would inherit.
            signal.signal(number, lambda *_: None)


def _end(rank: int, exit_code: int, error_file: Path, main_thread: int) -> None:
    where = user_line(sys._current_frames().get(main_thread))
    threads = ", ".join(sorted(each.name for each in _threads_in_the_way()))
    text = (
        f"rank {rank} was still at {where} {LEAVE_SECONDS:g} s after the end of its work, so that it was ended there "
        f"({f'it waited for its threads: {threads}' if threads else 'an atexit handler, or a process of its own'})"
    )
    with contextlib.suppress(OSError):
        late_file(error_file).write_text(text, encoding="utf-8")
    os._exit(exit_code)


def _threads_in_the_way() -> Iterator[threading.Thread]:
    main = threading.main_thread()
    return (each for each in threading.enumerate() if each is not main and not each.daemon)


def _write_buffers() -> None:
    """Files that were never closed: their buffers are written when an interpreter takes its modules apart."""
    for each in gc.get_objects():  # what was there before the fork is frozen, and not among them
        if issubclass(type(each), _BUFFERED) and not each.closed:
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what native code has printed
