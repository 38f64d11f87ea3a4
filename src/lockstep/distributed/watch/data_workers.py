"""Finds the data worker that the training thread waits for, and the line of the user's code that the worker is in.

A worker dumps its stack into memory of its own on SIGUSR2, also while native code holds Python's lock. The rank finds
that memory among the worker's open files.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from lockstep.distributed.watch.user_code import is_users

_NAME = "lockstep-stack"
_FRAME = re.compile(r'  File "(.+)", line (\d+) in ')
_LONGEST_DUMP = 64 * 1024
# How long a worker gets to dump its stack: the signal interrupts whatever it is in.
_DUMP_SECONDS = 0.05


def show_stack_on_request() -> None:
    """Called by a worker when it starts."""
    if hasattr(os, "memfd_create") and signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        memory = os.fdopen(os.memfd_create(_NAME), "wb", buffering=0)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # the rank cuts it off before it asks again
        # The rank that it was forked from had a handler: without this, ours would not be set.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, file=memory, all_threads=False)


def awaited(frame: FrameType | None) -> tuple[int, int] | None:
    """Returns the number and the process of the worker that a DataLoader on this stack waits for."""
    while frame is not None:
        loader = frame.f_locals.get("self") if frame.f_code.co_name == "_next_data" else None
        # Raised where this is no DataLoader of torch, or another version of it.
        with suppress(AttributeError, KeyError, IndexError, TypeError):
            number = loader._task_info[loader._rcvd_idx][0]  # type: ignore[union-attr]
            return number, loader._workers[number].pid  # type: ignore[union-attr]
        frame = frame.f_back
    return None


def line_of(pid: int) -> str:
    """Returns `data.py:42` where the worker is in the user's code; nothing where it cannot be asked."""
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
