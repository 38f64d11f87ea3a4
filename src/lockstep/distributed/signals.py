"""Listening to signals, and the requests that reach whoever started the ranks, and speaks for all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
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


_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own."""
    _control(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """End this process, by SIGKILL, as soon as the one that made it is gone."""
    parent = os.getppid()
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # gone before it could be asked for
        os._exit(1)


def end_below(roots: Iterable[int], spare: Iterable[int] = ()) -> list[int]:
    """End every process below these, but not these themselves; those that were there."""
    roots, spare = set(roots), set(spare)
    found: list[int] = []
    while True:  # one that was just about to make another has made it by the next look
        below = [pid for pid in processes_below(roots) if pid not in found and pid not in spare]
        if not below:
            return found
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        found += below


def state_of(pid: int) -> str | None:
    """One letter, as in proc(5): R, S, T (stopped), Z (dead); None where there is no such process, or no telling."""
    return _status(pid)[0]


def processes_below(roots: Iterable[int]) -> list[int]:
    """The children of these, their children and so on, as far as they are alive."""
    roots = set(roots)
    children: dict[int, list[int]] = {}
    for entry in _processes():
        state, parent = _status(entry)
        if state is not None and state != "Z":
            children.setdefault(parent, []).append(entry)
    found, waiting = [], list(roots)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if pid not in roots]


def _processes() -> list[int]:
    try:
        return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    except OSError:
        return []


def _status(pid: int) -> tuple[str | None, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, 0
    return fields[0], int(fields[1])


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
