"""Writing down where every thread is, on request: `kill -USR2 PID`, or by the launcher when ranks do not get on."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lockstep import run_files


@contextlib.contextmanager
def dumping_stacks(log: Path) -> Iterator[TextIO]:
    """Append the Python stacks of all threads to a log on SIGUSR2, also while native code holds Python's lock."""
    with os.fdopen(run_files.append(log, depth=2), "a", encoding="utf-8") as stream:
        taken = signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, signal.SIG_IGN)
        if not taken:
            faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
        try:
            yield stream
        finally:
            if not taken:
                faulthandler.unregister(signal.SIGUSR2)
