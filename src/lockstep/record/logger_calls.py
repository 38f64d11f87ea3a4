"""Notes which logger is in a call, in memory that others can read.

A logger whose native code holds Python's lock stops its whole process, heartbeats included. Whoever ends the run for
that reads here, from outside, which logger it was. A note costs a write to mapped memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from pathlib import Path

_BYTES = 512
_ENDING = ".call"


class CallNote:
    """The call that one logger is in."""

    def __init__(self, folder: Path, logger: str) -> None:
        self._logger, self._file = logger, folder / f".{logger}{_ENDING}"
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError):  # no room, or a disk that maps no files
            folder.mkdir(exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, bytes(_BYTES))
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)

    def enter(self, method: str) -> None:
        self._write(json.dumps({"logger": self._logger, "method": method, "since": time.time()}).encode())

    def leave(self) -> None:
        self._write(b"")

    def close(self) -> None:
        self._memory = None
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another logger's files are there
            self._file.parent.rmdir()

    def _write(self, text: bytes) -> None:
        if self._memory is not None and len(text) <= _BYTES:
            self._memory[:] = text.ljust(_BYTES, b"\0")


def suspect(run_folder: Path, stalled: str) -> str:
    """Returns a sentence on the logger that has been in a call for longest, where rank 0 went silent."""
    found = []
    for file in (run_folder / "loggers").glob(f".*{_ENDING}") if "rank 0: no sign of life" in stalled else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(file.read_bytes()[:_BYTES].rstrip(b"\0"))
            found.append((time.time() - float(note["since"]), str(note["logger"]), str(note["method"])))
    if not found:
        return ""
    seconds, logger, method = max(found)
    return (
        f". The logger log.{logger} has been in {method} for {seconds:.0f} s: where its native code does not release "
        "Python's lock, nothing else in that process runs. Leave it out, or log from another process"
    )
