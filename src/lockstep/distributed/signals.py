"""Listening to signals, and the requests that reach whoever started the ranks, and speaks for all of them."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

# What processes that serve a run take no notice of: they end with it, and not with a signal to the whole group.
QUIET_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


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


def nothing(number: int, frame: FrameType | None) -> None:
    """For a signal that is to have no effect. Not SIG_IGN, which every program that this process starts inherits."""


def unless_ignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those that were not ignored when this process was started: nohup, or a shell in the background, means it."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def interactive() -> bool:
    """Whether somebody types into this process, a notebook or an interpreter, and wants to keep it."""
    return hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__")


class Signals:
    """What the launcher was asked for: to stop, to end at once, to save."""

    # A terminal that hangs up, and a batch system's limit on time, ask for the same as Ctrl-C does.
    _STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
    # What would end this process, and with it the run, though it asks for nothing.
    _MEANINGLESS = tuple(
        getattr(signal, name)
        for name in ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")
        if hasattr(signal, name)
    )
    # A terminal may signal the launcher twice, or a batch system first it and then its group.
    _SAME_REQUEST_SECONDS = 1.0

    def __init__(self, save_on_request: bool) -> None:
        self.count = 0  # 1: to stop; 2: to end at once, which only Ctrl-C asks for: others repeat what they said
        self.name = ""
        self.save = False  # asked to save now, and not yet passed on
        self._save_on_request = save_on_request
        self._last = float("-inf")

    def listening(self) -> contextlib.AbstractContextManager[None]:
        idle = [each for each in self._MEANINGLESS if signal.getsignal(each) is signal.SIG_DFL]
        asking = [*unless_ignored(self._STOP), *([signal.SIGUSR1] if self._save_on_request else [])]
        return handled({**dict.fromkeys(idle, nothing), **dict.fromkeys(asking, self._received)})

    @property
    def how_to_end(self) -> str:
        """What ends the ranks without waiting for them."""
        return "once more" if self.name == "SIGINT" else "Ctrl-C (SIGINT)"

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif self.count == 0:
            self.count, self.name, self._last = 1, signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._last >= self._SAME_REQUEST_SECONDS:
            self.count = 2
