"""Every process of a run ends with it, whatever state it is in: on Linux, which tells who came from whom.

A rank's own processes (data workers, and what they start) may be stuck, or have lost their parent. The fork server that
ranks come from adopts what ranks leave behind, so that all of it can be found below it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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
