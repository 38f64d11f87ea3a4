"""What the driver shows: rank 0's words and numbers, as rank 0 would show them on a terminal of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from lockstep import run_files
from lockstep.ray.mailbox import Event
from lockstep.record import display
from lockstep.record.logs import screen_handler
from lockstep.shown import shown


class _WithoutRay:
    """Standard output, without what Ray's threads print there: it goes to a file, and the headline says it in brief."""

    def __init__(self, stream: TextIO, aside: TextIO) -> None:
        self._stream, self._aside = stream, aside

    def write(self, text: str) -> int:
        return (self._aside if threading.current_thread().name.startswith("ray_") else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Screen:
    """Draws events of rank 0 on this process's terminal, or prints them as plain lines."""

    def __init__(self) -> None:
        self._console = display.terminal()
        self._display = display.create(self._console)

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[None]:
        """While the block runs, this process's output is the run's; what Ray has to say goes to logs/ray.log."""
        ours, handler = logging.getLogger("lockstep"), screen_handler(self._console)
        before = (ours.level, ours.propagate)
        ours.setLevel(logging.INFO)
        ours.propagate = False
        ours.addHandler(handler)
        aside = os.fdopen(run_files.append(folder / "logs" / "ray.log", depth=2), "a", encoding="utf-8", buffering=1)
        out: Any = _WithoutRay(sys.stdout, aside)
        try:
            with contextlib.redirect_stdout(out):
                yield
        finally:
            self.close()
            aside.close()
            ours.level, ours.propagate = before
            ours.removeHandler(handler)

    def show(self, event: Event) -> None:
        if event["kind"] == "line":
            if self._console is None:
                print(event["text"], flush=True)
            else:
                self._console.print(event["text"], markup=False, soft_wrap=True)
        elif event["kind"] == "begin":
            self.close()  # of the attempt before
            self._display = display.create(self._console)
            self._display.begin(event["step"], event["epoch"], event["total_steps"])
        elif event["kind"] == "row":
            self._display.row(event["row"], event["lags"])

    def close(self) -> None:
        self._display.close()


def say(text: str) -> None:
    for line in shown(text).split("\n"):
        print(f"lockstep: {line}" if line else "", file=sys.stderr, flush=True)
