"""Files that are read whole: regular ones, of a size that fits their purpose, in UTF-8. Errors that name their file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_CONFIG = 1_000_000
LONGEST_RECORD = 64_000_000  # summary.json, a manifest


def read_text(path: Path, longest: int = LONGEST_CONFIG) -> str:
    """The text of a file; OSError where it cannot be had, also for the reason that it is no text."""
    try:
        return read_bytes(path, longest).decode()
    except UnicodeDecodeError as error:
        found = f"0x{error.object[error.start]:02x}"
        raise OSError(errno.EILSEQ, f"not text in UTF-8: byte {found} at position {error.start}", str(path)) from None


def read_bytes(path: Path, longest: int) -> bytes:
    """The bytes of a file; OSError where it cannot be had."""
    with open_regular(path) as stream:
        data = stream.read(longest + 1)
    if len(data) > longest:
        raise OSError(errno.EFBIG, f"it has more than {longest} bytes", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """Open a file without ever waiting: a pipe that nobody writes to and a device without an end are no files."""
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _require_regular(os.fstat(stream.fileno()), path)
    except OSError:
        stream.close()
        raise
    return stream


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError: a write by itself raises one without it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = "a pipe" if stat.S_ISFIFO(found.st_mode) else "a device or a socket"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
