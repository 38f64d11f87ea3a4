"""Signal handlers, requests to the launcher by signals, and the processes below a process."""

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

# Ignored by helper processes, which end with the run and not with a signal to the process group.
QUIET_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Installs signal handlers while the block runs; does nothing outside the main thread."""
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
    """Ignores a signal. SIG_IGN would be inherited by child processes."""


def unless_ignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns the signals that were not ignored (nohup, background shell) when this process started."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def interactive() -> bool:
    """Whether this is a notebook or an interactive interpreter."""
    return hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__")


class Signals:
    """Requests to the launcher: stop, end at once, save."""

    # A hang-up and a batch system's time limit mean the same as Ctrl-C.
    _STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
    # They would end this process, and with it the run.
    _MEANINGLESS = tuple(
        getattr(signal, name)
        for name in ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")
        if hasattr(signal, name)
    )
    # A terminal or a batch system may signal the launcher twice.
    _SAME_REQUEST_SECONDS = 1.0

    def __init__(self, save_on_request: bool) -> None:
        self.count = 0  # 1: stop; 2: end at once, which only Ctrl-C requests
        self.name = ""
        self.save = False  # requested, and not yet passed on
        self._save_on_request = save_on_request
        self._last = float("-inf")

    def listening(self) -> contextlib.AbstractContextManager[None]:
        idle = [each for each in self._MEANINGLESS if signal.getsignal(each) is signal.SIG_DFL]
        asking = [*unless_ignored(self._STOP), *([signal.SIGUSR1] if self._save_on_request else [])]
        return handled({**dict.fromkeys(idle, nothing), **dict.fromkeys(asking, self._received)})

    @property
    def how_to_end(self) -> str:
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
    """Makes this process the parent of orphans below it."""
    _control(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ends this process by SIGKILL when its parent dies."""
    parent = os.getppid()
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # gone before it could be asked for
        os._exit(1)


def end_below(roots: Iterable[int], spare: Iterable[int] = ()) -> list[int]:
    """Kills every process below these and returns their ids."""
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
    """Returns the state letter of proc(5): R, S, T (stopped), Z (dead); None if unknown."""
    return _status(pid)[0]


def processes_below(roots: Iterable[int]) -> list[int]:
    """Returns all living descendants."""
    roots, states = set(roots), _states()
    children: dict[int, list[int]] = {}
    for pid, (_, parent) in states.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], list(roots)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below  # also of one that is dead (Z): while a thread of it is still leaving, it keeps its children
    return [pid for pid in found if pid not in roots and states[pid][0] not in (None, "Z")]


def _states() -> dict[int, tuple[str | None, int]]:
    """Returns state and parent of every process. Looks again where one went meanwhile and left its children behind."""
    for _ in range(5):
        try:
            found = {int(each.name): _status(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()}
        except OSError:
            return {}
        if all(state is not None for state, _ in found.values()):
            break
    return found


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
