"""Where the runs of a comparison are kept: for as long as it takes, or for good where somebody wants to look."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError


@dataclass
class Place:
    path: Path
    keep: bool


@contextlib.contextmanager
def folder(out: Path | None) -> Iterator[Place]:
    """A new folder: the one that was asked for, or a temporary one that goes unless it is to be kept."""
    if out is None:
        place = Place(Path(tempfile.mkdtemp(prefix="lockstep-verify-")), keep=False)
    else:
        try:
            out.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: a new folder cannot be made there: {error.strerror}") from None
        place = Place(out.resolve(), keep=True)
    try:
        with _ending_like_an_interrupt():
            yield place
    finally:
        if not place.keep:
            shutil.rmtree(place.path, ignore_errors=True)


@contextlib.contextmanager
def _ending_like_an_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does: the run under way is ended, nothing stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
