"""Reads the heartbeats of all ranks, from outside of their group, and says when some of them are stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.distributed.activity import Beat, beat_key
from lockstep.distributed.watch.clock import RunningClock
from lockstep.distributed.watch.stall import Limits, Seen, Stall, find_slow, find_stall

# Early warnings, each with a request to save, are this many times `timeouts.stall` apart.
_EARLY_WARNINGS = 10


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
        self._warned = 0.0  # the longest time without progress that was warned of while no rank waited
        self._next_early_warning = began  # of ranks that others wait for

    def look(self) -> Stall | None:
        now = self._clock.now()
        beats = self._store.read_all([beat_key(rank) for rank in self._ranks])
        for rank, beat in zip(self._ranks, map(Beat.decode, beats), strict=True):
            known, _ = self._newest[rank]
            if beat is not None and (known is None or beat.count != known.count):
                self._newest[rank] = (beat, now)
        self.everyone = [self._seen(rank, now) for rank in self._ranks]
        return find_stall(self.everyone, self._limits)

    def warning(self) -> Stall | None:
        """Returns what to warn of since the last look: rarely, as user code that takes long usually does so again."""
        slow = find_slow(self.everyone, self._limits)
        if slow is None:
            return None
        now, still = self._clock.now(), max(each.still for each in self.everyone if each.rank in slow.ranks)
        if slow.waited_for:
            if now < self._next_early_warning:
                return None
            self._next_early_warning = now + _EARLY_WARNINGS * self._limits.stall
        elif still < 2 * self._warned:
            return None
        else:
            self._warned = still
        return slow

    @property
    def begun(self) -> bool:
        return any(beat is not None and beat.begun for beat, _ in self._newest.values())

    def _seen(self, rank: int, now: float) -> Seen:
        beat, heard = self._newest[rank]
        return Seen(rank, beat, now - heard, self._suspended(rank))
