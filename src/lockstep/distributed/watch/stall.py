"""Detects stuck ranks from their heartbeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.schema import Timeouts
from lockstep.distributed.activity import Beat, beat_key
from lockstep.distributed.topology import ranks_text

# Ranks that wait for different things wait forever, so they get less than `timeouts.stall`; on the CPU only, since the
# host of a rank with a device queue may be ahead.
APART_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """How long a rank may make no progress, the first time and later."""

    stall: float
    first_step: float
    apart: float = math.inf  # while they wait for different things

    @classmethod
    def of(cls, settings: Timeouts, runtime: str) -> Limits:
        """Returns the limits for a device family."""
        if settings.stall is None:
            return cls(math.inf, math.inf)
        return cls(settings.stall, settings.first_step, APART_SECONDS if runtime == "cpu" else math.inf)

    def without_progress(self, beat: Beat | None) -> float:
        first = beat is None or beat.first
        return max(self.stall, self.first_step if first else 0.0, beat.limit if beat else 0.0)

    def without_a_beat(self, beat: Beat | None) -> float:
        """Only native code that holds the GIL delays beats."""
        limit = self.without_progress(beat)
        return limit if limit < math.inf else max(self.stall, self.first_step)


@dataclass(frozen=True)
class Seen:
    rank: int
    beat: Beat | None  # the newest
    quiet: float  # seconds since that beat, by the watcher's clock
    suspended: bool = False  # stopped by a signal

    @property
    def still(self) -> float:
        return self.quiet + (self.beat.still if self.beat else 0.0)


@dataclass(frozen=True)
class Stall:
    ranks: tuple[int, ...]
    message: str
    waited_for: bool = True


def find_stall(everyone: Sequence[Seen], limits: Limits) -> Stall | None:
    """Finds ranks that hold up others beyond the limits, and ranks that all wait for each other.

    If no rank waits for another, nobody is stuck: user code may take any time.
    """
    there = _there(everyone)
    waiting = _waiting(there)
    if waiting:
        found, silent = _overdue(everyone, limits, waiting)
        if found:
            return Stall(tuple(found), _message(everyone, set(found), silent))
    if not there or any(_works(each) for each in there):
        return None
    return _all_wait(everyone, limits)


def find_slow(everyone: Sequence[Seen], limits: Limits) -> Stall | None:
    """Finds ranks to warn about: past half of their limit if others wait for them, past the limit if none does."""
    waiting = _waiting(_there(everyone))
    if not waiting:
        found, silent = _overdue(everyone, limits, [])
        continues = "No rank waits for another, so the run continues"
        message = f"{_message(everyone, set(found), silent)}. {continues}; run.working(name, limit) sets the limit"
        return Stall(tuple(found), message, waited_for=False) if found else None
    found, _ = _overdue(everyone, limits, waiting, 0.5)
    held_up = [
        f"rank {each.rank} ({each.beat.describe() if each.beat else 'never seen'})"
        for each in everyone
        if each.rank in found
    ]
    waited = f"{ranks_text([each.rank for each in waiting])} waited {max(each.still for each in waiting):.0f} s for"
    ends = "The run ends at the limit, which run.working(name, limit) or timeouts.stall sets; a save is requested"
    return Stall(tuple(found), f"{waited} {', '.join(held_up)}. {ends}") if found else None


def _there(everyone: Sequence[Seen]) -> list[Seen]:
    return [each for each in everyone if each.beat is None or not each.beat.left]


def _overdue(
    everyone: Sequence[Seen], limits: Limits, waiting: Sequence[Seen], part: float = 1.0
) -> tuple[list[int], set[int]]:
    """Returns the ranks that exceed this part of their limits, and those of them without heartbeats.

    The `waiting` ranks must have waited as long: after user code on all ranks, the first to finish waits a moment.
    """
    there, waited = _there(everyone), max((each.still for each in waiting), default=math.inf)
    silent = {each.rank for each in there if each.quiet > part * _longest_silence(each, limits)}
    if waited <= part * limits.stall:
        silent = set()
    # A device queue blocks its host at any line while another rank uses its longer limit.
    allowed = max((limits.without_progress(each.beat) for each in everyone if _works(each)), default=0.0)
    if allowed == math.inf and any(each.beat and each.beat.waits for each in there):
        allowed = max(limits.stall, limits.first_step)  # somebody waits for a rank that never reported
    stuck = {each.rank for each in everyone if _works(each) and min(each.still, waited) > part * allowed}
    stuck -= {each.rank for each in waiting}
    return sorted(silent | stuck), silent


def _waiting(there: Sequence[Seen]) -> list[Seen]:
    """Returns the ranks that wait for another: by their report, or with an exchange that another has not begun.

    The latter is how a rank with a device queue waits: its host may be at any line.
    """
    begun = [each.beat.exchanges for each in there if each.beat is not None]
    return [each for each in there if each.beat and (each.beat.waits or each.beat.exchanges > min(begun))]


def _longest_silence(seen: Seen, limits: Limits) -> float:
    """A stopped process does not use its longer limit."""
    if seen.suspended and _works(seen) and seen.beat is not None:
        return limits.without_a_beat(replace(seen.beat, limit=0.0, first=False))
    return limits.without_a_beat(seen.beat)


def _all_wait(everyone: Sequence[Seen], limits: Limits) -> Stall | None:
    waiting = [each for each in everyone if each.beat and not each.beat.left]
    still = min(each.still for each in waiting)
    places = {each.beat.at for each in everyone if each.beat}
    limit = max(limits.without_progress(each.beat) for each in waiting)
    first = any(each.beat and each.beat.first for each in waiting)
    if len(places) > 1 and still > (limit if first else min(limit, limits.apart)):
        return Stall(
            tuple(each.rank for each in everyone),
            f"the ranks wait for different things, since {still:.0f} s: {_waits(everyone)}. One of them left out, or "
            "added, a call that all must make: look for a branch on the rank, a batch that only some ranks skip, or "
            "ranks with different numbers of batches",
        )
    if still > limit:
        return Stall(
            tuple(each.rank for each in everyone),
            f"all ranks wait, and nothing comes: {_waits(everyone)}, since {still:.0f} s. The connection between them "
            "may be cut",
        )
    return None


def _works(seen: Seen) -> bool:
    return seen.beat is None or not seen.beat.waits


def _message(everyone: Sequence[Seen], stuck: set[int], silent: set[int]) -> str:
    lines = [_stuck(each, each.rank in silent) for each in everyone if each.rank in stuck]
    others = [each for each in everyone if each.rank not in stuck]
    waiting = [each for each in others if each.beat and each.beat.waits]
    working = [each for each in others if _works(each)]
    if waiting:
        lines.append(_waits(waiting))
    if working:
        lines.append(f"{ranks_text([each.rank for each in working])} still at work")
    return "; ".join(lines)


def _stuck(seen: Seen, silent: bool) -> str:
    beat = seen.beat
    if beat is None:
        return f"rank {seen.rank}: never gave a sign of life"
    doing = f"waits in {beat.at}" if beat.waits else f"in {beat.at}"
    where = f", {beat.where}" if beat.where else ""
    if seen.suspended:
        return f"rank {seen.rank}: stopped by a signal (SIGSTOP) {doing}{where}, since {seen.still:.0f} s"
    if silent:
        return (
            f"rank {seen.rank}: no sign of life since {seen.quiet:.0f} s, last {doing}{where} (stopped, out of reach, "
            "or in native code that holds Python's lock)"
        )
    return f"rank {seen.rank}: {doing}{where}, since {seen.still:.0f} s"


def _waits(waiting: Sequence[Seen]) -> str:
    at: dict[str, list[int]] = {}
    left: list[int] = []
    for each in waiting:
        assert each.beat is not None
        (left if each.beat.left else at.setdefault(each.beat.at, [])).append(each.rank)
    words = [f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {place}" for place, ranks in at.items()]
    return "; ".join([*words, *([f"{ranks_text(left)} {'has' if len(left) == 1 else 'have'} left"] if left else [])])


# A longer gap between two reads is time in which this process did not run.
_PAUSE_SECONDS = 5.0


class RunningClock:
    """Counts the seconds in which this process ran: a paused job did not stall. Read it at least every second."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.paused = 0.0

    def now(self) -> float:
        now = time.monotonic()
        if now - self._last > _PAUSE_SECONDS:
            self.paused += now - self._last
        self._last = now
        return now - self.paused


# Early warnings are this many times `timeouts.stall` apart.
_EARLY_WARNINGS = 10


class Watcher:
    """Reads the newest beats. It uses its own clock, so the clocks of hosts may differ."""

    def __init__(
        self, store: Any, ranks: Iterable[int], limits: Limits, suspended: Callable[[int], bool] | None = None
    ) -> None:
        self._store, self._ranks, self._limits = store, list(ranks), limits
        self._suspended = suspended or (lambda rank: False)
        self._clock = RunningClock()
        began = self._clock.now()
        self._newest: dict[int, tuple[Beat | None, float]] = dict.fromkeys(self._ranks, (None, began))
        self.everyone: list[Seen] = []  # as of the last look
        self._warned = 0.0  # the longest time without progress warned about while no rank waited
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
        """Returns what to warn about; rarely, as slow user code is usually slow again."""
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
