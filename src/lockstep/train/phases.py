"""The phases of a run's timeline that only its steps tell."""

from __future__ import annotations

import time

from lockstep.record.chronicle import Chronicle


class Phases:
    """When training began, and how long the first step took where it had to be compiled."""

    def __init__(self, chronicle: Chronicle) -> None:
        self._chronicle = chronicle
        self._began: tuple[int, float] | None = None

    def at(self, step: int, compiles: bool) -> bool:
        """Between two steps, where this is the number of the last one; whether there is no more to note."""
        if self._began is None:
            self._began = (step, time.time())
            self._chronicle.note("train", self._began[1], step=step)
            return not compiles
        first, began = self._began
        if step > first:
            self._chronicle.note("compile", began, time.time(), step=step)
        return step > first
