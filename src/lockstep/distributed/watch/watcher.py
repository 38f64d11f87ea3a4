"""Reads the heartbeats of all ranks, from outside of their group, and says when some of them are stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.distributed.activity import Beat, beat_key
from lockstep.distributed.watch.clock import RunningClock
from lockstep.distributed.watch.stall import Limits, Seen, Stall, find_stall


class Watcher:
    """Looks at the newest beats; time is measured by its own clock, so hosts need not agree on theirs."""

    def __init__(
        self, store: Any, ranks: Iterable[int], limits: Limits, suspended: Callable[[int], bool] | None = None
    ) -> None:
        self._store, self._ranks, self._limits = store, list(ranks), limits
        self._suspended = suspended or (lambda rank: False)
        self._clock = RunningClock()
        began = self._clock.now()
        self._newest: dict[int, tuple[Beat | None, float]] = dict.fromkeys(self._ranks, (None, began))
        self.everyone: list[Seen] = []  # as of the last look

    def look(self) -> Stall | None:
        now = self._clock.now()
        beats = self._store.read_all([beat_key(rank) for rank in self._ranks])
        for rank, beat in zip(self._ranks, map(Beat.decode, beats), strict=True):
            known, _ = self._newest[rank]
            if beat is not None and (known is None or beat.count != known.count):
                self._newest[rank] = (beat, now)
        self.everyone = [self._seen(rank, now) for rank in self._ranks]
        return find_stall(self.everyone, self._limits)

    @property
    def begun(self) -> bool:
        """Whether any rank has made a step, as far as it is known."""
        return any(beat is not None and beat.begun for beat, _ in self._newest.values())

    def _seen(self, rank: int, now: float) -> Seen:
        beat, heard = self._newest[rank]
        return Seen(rank, beat, now - heard, self._suspended(rank))
