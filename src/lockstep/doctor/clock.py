"""Whether the clock can be believed: it is not before what is installed, and does not jump while one looks."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.doctor.check import Check

_REMEDY = "set the clock, and keep it by NTP or chrony: logs, run folders and certificates go by it"
# Archives hold times without a zone, so the files of a package may seem to be from later today.
_ZONE_SECONDS = 24 * 3600.0
_JUMP_SECONDS = 0.5


def offset() -> float:
    """What the wall clock shows beyond the clock that never jumps."""
    return time.time() - time.monotonic()


def judge(now: float, installed: float, jump: float) -> Check:
    """Against when the newest package was installed, and by how far the clock jumped meanwhile."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    data = {"time": now, "jump_seconds": jump}
    if now < installed - _ZONE_SECONDS:
        since = time.strftime("%Y-%m-%d", time.localtime(installed))
        return Check("clock", "warn", f"{shown}, but what is installed here is from {since}", _REMEDY, data)
    if abs(jump) > _JUMP_SECONDS:
        return Check("clock", "warn", f"{shown}, and jumped by {jump:+.1f} s while this ran", _REMEDY, data)
    return Check("clock", "ok", shown, data=data)


def newest_install() -> float:
    return max(_times(), default=0.0)


def _times() -> Iterator[float]:
    for package in ("lockstep", "torch"):
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None and Path(found.origin).is_file():
            yield Path(found.origin).stat().st_mtime
