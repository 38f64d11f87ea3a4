"""Reads files that the user named: regular ones, of a size that fits their purpose, in UTF-8. Links are followed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lockstep import run_files

LONGEST_CONFIG = 1_000_000


def read_text(path: Path, longest: int = LONGEST_CONFIG) -> str:
    """Returns the text of a file; raises OSError where it cannot be read or is not UTF-8."""
    return run_files.read_text(path, longest, depth=0)


def read_bytes(path: Path, longest: int) -> bytes:
    return run_files.read_bytes(path, longest, depth=0)


def open_regular(path: Path) -> BinaryIO:
    return run_files.open_file(path, depth=0)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError: a write by itself raises one without it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
