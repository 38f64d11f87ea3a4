"""Standard output and error that never break a run: what cannot be written there is dropped.

Whoever reads them may be gone (`| head`, a `tee` that Ctrl-C ended), the disk behind them full, or they were closed
from the start. The log files of a run have everything that matters.
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
    """Say something on standard error, if anybody hears it."""
    try:
        sys.stderr.write(f"{shown(text)}{end}")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # broken; closed; none at all
        pass


def colour(environment: Mapping[str, str]) -> bool | None:
    """Whether to write in colour: always, never, or (None) where the stream is a terminal. As other programs do:
    NO_COLOR (no-color.org) counts more than FORCE_COLOR, and a terminal that is dumb shows none."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    return False if environment.get("TERM") == "dumb" or environment.get("FORCE_COLOR") == "0" else None


def make_safe() -> None:
    """From here on, nothing that this process prints can raise: in the user's code neither."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed, so that the next file to be opened would become standard output
            # For the processes that this one starts as well: else theirs would be closed, and whatever they open first
            # (a pipe by which a rank knows that its launcher lives) would become their output, and be written over.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _safe(sys.stdout, 1)
    sys.stderr = _safe(sys.stderr, 2)


def _safe(stream: Any, number: int) -> TextIO:
    try:
        if stream is not None and stream.fileno() != number:
            return stream  # type: ignore[no-any-return]  # somebody has replaced it, and knows why
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
