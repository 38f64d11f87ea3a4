"""Listening to signals, and the requests that reach whoever started the ranks, and speaks for all of them."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Send signals to these handlers while the block runs; Python lets nothing but the main thread do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interactive() -> bool:
    """Whether somebody types into this process, a notebook or an interpreter, and wants to keep it."""
    return hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__")


class Signals:
    """How often the launcher was asked to stop, and whether to save."""

    _STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    # A batch system may signal the launcher and then its group: two signals this close together are one request.
    _SAME_REQUEST_SECONDS = 1.0

    def __init__(self, save_on_request: bool) -> None:
        self.count = 0
        self.name = ""
        self.save = False  # asked to save now, and not yet passed on
        self._numbers = (*self._STOP, *((signal.SIGUSR1,) if save_on_request else ()))
        self._last = float("-inf")

    def listening(self) -> contextlib.AbstractContextManager[None]:
        return handled(dict.fromkeys(self._numbers, self._received))

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        now = time.monotonic()
        if now - self._last >= self._SAME_REQUEST_SECONDS:
            self.count, self.name, self._last = self.count + 1, signal.Signals(number).name, now
