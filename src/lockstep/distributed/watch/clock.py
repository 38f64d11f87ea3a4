"""A clock that stands still while its process is stopped: a job that was paused and continued did not stall."""

from __future__ import annotations

import time

# Whoever reads the clock does so several times a second: a longer gap is time in which this process did not run.
_PAUSE_SECONDS = 5.0


class RunningClock:
    """Seconds in which this process ran, to be read at least every second or so."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.paused = 0.0

    def now(self) -> float:
        now = time.monotonic()
        if now - self._last > _PAUSE_SECONDS:
            self.paused += now - self._last
        self._last = now
        return now - self.paused
