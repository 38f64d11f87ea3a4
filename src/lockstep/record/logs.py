"""The log of a rank: its own file, where every line carries the rank, and the console for rank 0.

In a pipe every line carries the time of day, and a message that repeats is shown at most once per 10 seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import run_files
from lockstep.errors import ConfigError
from lockstep.shown import shown

if TYPE_CHECKING:
    from rich.console import Console

# Logs to the rank's file alone, whatever handlers others have given the root logger.
file_only = logging.getLogger("lockstep.file_only")
file_only.propagate = False

_SECONDS_BETWEEN = 10.0


@contextlib.contextmanager
def rank_log(folder: Path, rank: int, console: Console | None, redirect: bool) -> Iterator[Path]:
    """Logs to logs/rank-N.log while the context is open; with redirect, other ranks' whole output goes there."""
    _make(folder, rank)
    path = folder / f"rank-{rank}.log"
    if redirect and rank != 0:
        _redirect_output(path)
    to_file = _LogFile(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(f"%(asctime)s [RANK {rank}] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        handlers.append(screen_handler(console))
    ours, everything = logging.getLogger("lockstep"), logging.getLogger()
    before = (ours.level, ours.propagate)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in handlers:
        ours.addHandler(handler)
    for logger in (everything, file_only):
        logger.addHandler(to_file)
    try:
        yield path
    finally:
        for logger in (everything, file_only):
            logger.removeHandler(to_file)
        ours.level, ours.propagate = before
        for handler in handlers:
            ours.removeHandler(handler)
            handler.close()


def _make(folder: Path, rank: int) -> None:
    """Makes the folder of logs, with the run's folder on a host that does not see rank 0's disk."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with run_files.folder(folder, make=True):
            pass
    except OSError as error:
        raise ConfigError(
            f"rank {rank} on {socket.gethostname()}: its log goes to {folder}, which cannot be made there: "
            f"{error.strerror}. Make it writable for uid {os.getuid()} on that host"
        ) from None


def screen_handler(console: Console | None) -> logging.Handler:
    """Returns the handler for rank 0's console: above a live display, or as plain lines."""
    handler = _Lines(sys.stdout) if console is None else _ConsoleHandler(console)
    handler.setFormatter(_ScreenFormatter(with_time=console is None))
    return handler


class Pace(logging.Filter):
    """Passes records with the same `repeats` at most once per 10 seconds; the first and `is_last` always.

    Rows of training also wait while other rows are shown: a validation takes the place of the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}
        self._held: dict[str, logging.LogRecord] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, "repeats", None)
        if kind is None:
            return True
        now = time.monotonic()
        if now - self._shown.get(kind, -math.inf) < _SECONDS_BETWEEN and not getattr(record, "is_last", False):
            self._held[kind] = record
            return False
        self._shown[kind] = now
        if kind == "validation" and "training" in self._shown:
            self._shown["training"] = now
        self._held.pop(kind, None)
        return True

    def take_held(self) -> list[logging.LogRecord]:
        """Returns the newest record of each kind that was not passed, to be shown at the end."""
        held, self._held = sorted(self._held.values(), key=lambda record: record.created), {}
        return held


class _LogFile(logging.FileHandler):
    """A log file; a full disk loses lines, and nothing else."""

    def _open(self) -> TextIOWrapper:
        return os.fdopen(run_files.append(Path(self.baseFilename), depth=2), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still in its buffer
            super().close()


class _Lines(logging.StreamHandler[Any]):
    """Plain lines on a console that may be gone."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._pace = Pace()
        self.addFilter(self._pace)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        for record in self._pace.take_held():
            self.emit(record)
        with contextlib.suppress(OSError):  # what is still in its buffer
            super().close()


class _ScreenFormatter(logging.Formatter):
    """The text without its rank, since only rank 0 logs there; the level only where it is a warning or worse."""

    def __init__(self, with_time: bool) -> None:
        super().__init__()
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S ", time.localtime(record.created)) if self._with_time else ""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"{clock}{level}{shown(super().format(record))}"


class _ConsoleHandler(logging.Handler):
    """Prints above a live display."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(self.format(record), markup=False, soft_wrap=True)


def _redirect_output(path: Path) -> None:
    """Sends everything that this process prints, from Python or below it, to its log."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = run_files.append(path, depth=2)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
