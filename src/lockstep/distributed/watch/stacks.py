"""Stacks on request (`kill -USR2 PID`), and the lines of user code that a rank or its data workers are in.

A data worker dumps its stack into a memfd on SIGUSR2, also while native code holds the GIL. The rank finds the memfd
among the open files of the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from lockstep import run_files


@contextlib.contextmanager
def dumping_stacks(log: Path) -> Iterator[TextIO]:
    """Appends the stacks of all threads to a log on SIGUSR2, also while native code holds the GIL."""
    with os.fdopen(run_files.append(log, depth=2), "a", encoding="utf-8") as stream:
        taken = signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, signal.SIG_IGN)
        if not taken:
            faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
        try:
            yield stream
        finally:
            if not taken:
                faulthandler.unregister(signal.SIGUSR2)


_NOT_THE_USERS = tuple(
    str(Path(folder).resolve())
    for folder in (Path(__file__).parents[2], sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
)


def is_users(file: str) -> bool:
    """Whether a file is user code: neither Lockstep nor a library."""
    return not file.startswith(("<", *_NOT_THE_USERS)) and "site-packages" not in file


_NAME = "lockstep-stack"
_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')
_LONGEST_DUMP = 64 * 1024
# How long a worker gets to dump its stack: the signal interrupts whatever it is in.
_DUMP_SECONDS = 0.05


def show_stack_on_request() -> None:
    """Installs the handler in a data worker."""
    if hasattr(os, "memfd_create") and signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        memory = os.fdopen(os.memfd_create(_NAME), "wb", buffering=0)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # the rank cuts it off before it asks again
        # The rank that it was forked from had a handler: without this, ours would not be set.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, file=memory, all_threads=False)


def awaited(frame: FrameType | None) -> tuple[int, int] | None:
    """Returns the number and pid of the worker that a DataLoader on this stack waits for."""
    while frame is not None:
        loader = frame.f_locals.get("self") if frame.f_code.co_name == "_next_data" else None
        # Raised where this is no DataLoader of torch, or another version of it.
        with suppress(AttributeError, KeyError, IndexError, TypeError):
            number = loader._task_info[loader._rcvd_idx][0]  # type: ignore[union-attr]
            return number, loader._workers[number].pid  # type: ignore[union-attr]
        frame = frame.f_back
    return None


def line_of(pid: int) -> str:
    """Returns a line like `data.py:42` of a worker, or nothing."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(each).startswith(f"/memfd:{_NAME}"):  # noqa: PTH115  its text
                with each.open("r+b", buffering=0) as memory:
                    memory.truncate()
                    os.kill(pid, signal.SIGUSR2)
                    time.sleep(_DUMP_SECONDS)
                    dumped = memory.read(_LONGEST_DUMP).decode(errors="replace")
                frames = _FRAME.findall(dumped)
                users = [found for found in frames if is_users(found[0])]
                return "".join(f"{Path(file).name}:{line}" for file, line in (users or frames)[:1])
    return ""
