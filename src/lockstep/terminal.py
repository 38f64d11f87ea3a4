"""Standard output and error that never break a run: what cannot be written is dropped.

Their reader may be gone (`| head`, a `tee` that Ctrl-C ended), the disk may be full, or they were closed from the
start. The log files of a run have everything that matters.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from lockstep.shown import shown

# How long a reader of a pipe that does not block may take to make room.
_ROOM_SECONDS = 1.0


def tell(text: str, end: str = "\n") -> None:
    """Writes to standard error, and ignores an error."""
    try:
        sys.stderr.write(f"{shown(text)}{end}")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # broken; closed; none at all
        pass


def say(text: str) -> None:
    """Writes lines of Lockstep's own to standard error."""
    tell("\n".join(f"lockstep: {line}" if line else "" for line in text.split("\n")))


def standard_error() -> int:
    """Returns another descriptor of standard error; where that is closed, one whose text is dropped."""
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def colour(environment: Mapping[str, str]) -> bool | None:
    """Whether to write in colour; None where that depends on the stream. NO_COLOR (no-color.org) counts more than
    FORCE_COLOR."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    return False if environment.get("TERM") == "dumb" or environment.get("FORCE_COLOR") == "0" else None


def make_safe() -> None:
    """Replaces standard output and error by streams that never raise, in the user's code neither."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed, so that the next file to be opened would become standard output
            # Inheritable: else the first file that a child process opens (a pipe to its launcher) would become its
            # standard output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _safe(sys.stdout, 1)
    sys.stderr = _safe(sys.stderr, 2)


def _safe(stream: Any, number: int) -> TextIO:
    try:
        if stream is not None and stream.fileno() != number:
            return stream  # type: ignore[no-any-return]  # replaced on purpose
        if stream is not None:
            stream.flush()
    except io.UnsupportedOperation:
        return stream  # type: ignore[no-any-return]  # it has no descriptor at all
    except (OSError, ValueError):  # broken already, or closed
        pass
    return io.TextIOWrapper(
        io.BufferedWriter(_Dropping(number, "wb", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or bool(getattr(stream, "line_buffering", False)),
    )


class _Dropping(io.FileIO):
    """A descriptor to write to; what cannot be written counts as written."""

    def write(self, data: Any) -> int:
        whole = memoryview(data).nbytes
        try:
            written = super().write(data)
            if written is None:  # it does not block, and is full
                select.select([], [self], [], _ROOM_SECONDS)
                written = super().write(data)
        except (OSError, ValueError):
            return whole
        return whole if written is None else written
