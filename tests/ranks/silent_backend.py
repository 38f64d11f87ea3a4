"""A rank whose collectives silently do nothing, as those of an XLA runtime that does not span the processes."""

from __future__ import annotations

import lockstep
from lockstep.runtime.cpu import CpuRuntime

CpuRuntime.backend = "fake"


def main(run: lockstep.Run) -> None:
    raise AssertionError("the roll call lets nobody through")
