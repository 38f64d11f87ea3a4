"""What a run says to its profiler, and what a profiler needs of a runtime."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

_NOTHING = contextlib.nullcontext()


class Profiler:
    """No profile: a call that does nothing. What a run says to it several times in every step costs no more."""

    def next_step(self, step: int) -> None:
        """Between two steps: the one with this number is about to begin."""

    def enter(self, region: str | None) -> None:
        """From here on the step is in this region, or in none."""

    def region(self, name: str) -> AbstractContextManager[Any]:
        """A region with an end of its own, in the midst of whatever the step is in."""
        return _NOTHING

    def close(self) -> None:
        """The run is over: write what is unwritten."""

    def give_up(self) -> None:
        """The run failed: let go, and write nothing."""


class Backend(Protocol):
    """Takes traces, one at a time, with what the runtime has for it."""

    def start(self, folder: Path) -> None:
        """From here on everything is recorded."""

    def stop(self) -> Path:
        """Write what was recorded into the folder; the file, or the folder of files, that it went to."""

    def abandon(self) -> None:
        """Stop recording, and keep nothing."""

    def step(self, number: int) -> AbstractContextManager[Any]:
        """What a viewer takes for one step."""

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch of time."""
