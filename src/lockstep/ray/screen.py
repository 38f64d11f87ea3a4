"""What the driver shows: rank 0's words and numbers, as rank 0 would show them on a terminal of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from lockstep import display
from lockstep.logs import screen_handler
from lockstep.ray.desk import Event


class Screen:
    """Draws events of rank 0 on this process's terminal, or prints them as plain lines."""

    def __init__(self) -> None:
        self._console = display.terminal()
        self._display = display.create(self._console)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        ours, handler = logging.getLogger("lockstep"), screen_handler(self._console)
        before = (ours.level, ours.propagate)
        ours.setLevel(logging.INFO)
        ours.propagate = False
        ours.addHandler(handler)
        try:
            yield
        finally:
            self.close()
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
