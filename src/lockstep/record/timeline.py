"""The timeline of a run, for reports and `lockstep watch`: what it did when, where its ranks are, who is slow.

    timeline.jsonl  a line per change of phase: starts, restarts and failures by the launcher, the rest by rank 0
    live.json       where every rank is, replaced about once a second by the process that sees all heartbeats
    lags.jsonl      how long each rank took for a step until it was ready to exchange gradients, over time

None of it is needed to resume: an error costs a warning. Nothing here happens once per step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE
from lockstep.record.writers import LiveFiles

if TYPE_CHECKING:
    from lockstep.distributed.failure import Failure, Result
    from lockstep.distributed.watch.stall import Seen

logger = logging.getLogger(__name__)

TIMELINE_FILE, LIVE_FILE, LAGS_FILE = "timeline.jsonl", "live.json", "lags.jsonl"
# Written by the driver of a run on Ray: rank 0's may be on another disk, and is copied over the one here.
DRIVER_TIMELINE_FILE = "timeline-driver.jsonl"

_LIVE_SECONDS = 1.0
_LONGEST_TEXT = 4000
# A line of lags once a second at first, then whenever the run is 1 % longer: about a thousand in a month.
_LAG_SECONDS, _LAG_LINES = 1.0, 100


class Timeline:
    """One process's part of the timeline. Every method returns at once; without a folder nothing is written."""

    def __init__(
        self, folder: Path | None, warn: Callable[[str], object] = logger.warning, timeline: str = TIMELINE_FILE
    ) -> None:
        self.folder, self._timeline = folder, timeline
        self._files = LiveFiles(folder, warn) if folder is not None else None
        self._next_live = 0.0
        self._lags = _Lags()

    def note(self, kind: str, at: float | None = None, until: float | None = None, **more: Any) -> None:
        """Notes a phase that began `at` (now by default), or something that happened then."""
        if self._files is None:
            return
        began = time.time() if at is None else at
        rest = {name: _short(value) for name, value in more.items() if value is not None}
        line = {"at": round(began, 3), "until": None if until is None else round(until, 3), "kind": kind, **rest}
        self._files.append(self._timeline, line)

    @contextlib.contextmanager
    def during(self, kind: str, **more: Any) -> Iterator[None]:
        """Notes a phase when it is over, also by an exception."""
        began = time.time()
        try:
            yield
        finally:
            self.note(kind, began, time.time(), **more)

    def failed(self, kind: str, failure: Failure, world_size: int, **more: Any) -> None:
        """Notes a start that failed: the run is over, or is restarted."""
        who = None if failure.concerns_all_ranks else failure.rank
        self.note(
            kind, rank=who, host=failure.host, note=failure.cause, world_size=world_size, exit_code=failure.exit_code,
            traceback=failure.traceback or None, **more,
        )  # fmt: skip

    def ended(self, result: Result, world_size: int) -> None:
        if result.failure is not None:
            self.failed("end", result.failure, world_size, status="failed")
            return
        status = {0: "completed", PREEMPTED_EXIT_CODE: "preempted", INTERRUPTED_EXIT_CODE: "interrupted"}
        self.note("end", status=status.get(result.exit_code, "failed"), exit_code=result.exit_code)

    def show(self, everyone: Sequence[Seen]) -> None:
        """Writes live.json, unless that was done less than a second ago."""
        if self._files is not None and time.monotonic() >= self._next_live:
            self._next_live = time.monotonic() + _LIVE_SECONDS
            seen, at = list(everyone), time.time()
            self._files.replace(LIVE_FILE, lambda: _live(seen, at))

    def lags(self, step: int, busy: Sequence[float]) -> None:
        """Notes by rank how long each was busy in a step."""
        if self._files is None:
            return
        line = self._lags.add(time.time(), step, busy)
        if line is not None:
            self._files.append(LAGS_FILE, line)

    def close(self) -> None:
        if self._files is None:
            return
        line = self._lags.rest(time.time())
        if line is not None:
            self._files.append(LAGS_FILE, line)
        self._files.close()


def opened(
    folder: Path | None, warn: Callable[[str], object], file: str = TIMELINE_FILE
) -> contextlib.closing[Timeline]:
    return contextlib.closing(Timeline(folder, warn, file))


class _Lags:
    """The mean over the steps between two lines."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._sums: list[float] = []
        self._count = self._step = 0

    def add(self, now: float, step: int, busy: Sequence[float]) -> dict[str, Any] | None:
        if self._began is None:
            self._began = self._last = now
        if len(busy) != len(self._sums):
            self._sums, self._count = [0.0] * len(busy), 0
        self._sums = [total + each for total, each in zip(self._sums, busy, strict=True)]
        self._count, self._step = self._count + 1, step
        enough = now - self._last >= max(_LAG_SECONDS, (now - self._began) / _LAG_LINES)
        return self.rest(now) if enough else None

    def rest(self, now: float) -> dict[str, Any] | None:
        if not self._count:
            return None
        means = [float(f"{total / self._count:.3g}") for total in self._sums]
        line = {"at": round(now, 3), "since": round(self._last, 3), "step": self._step, "busy": means}
        self._last, self._sums, self._count = now, [0.0] * len(means), 0
        return line


def _live(everyone: list[Seen], at: float) -> dict[str, Any]:
    beats = [each.beat for each in everyone if each.beat is not None]
    busy = [each.busy for each in beats if each.busy is not None]
    fastest = min(busy, default=0.0)
    total = max((each.total_steps for each in beats if each.total_steps is not None), default=None)
    step = max((each.step for each in beats), default=0)  # under way
    return {
        "at": round(at, 3),
        "step": step if total is None else min(step, total),
        "total_steps": total,
        "ranks": [_rank(each, fastest) for each in everyone],
    }


def _rank(seen: Seen, fastest: float) -> dict[str, Any]:
    beat, still = seen.beat, round(seen.still, 1)  # seconds without progress
    if beat is None:
        return {"rank": seen.rank, "host": "", "step": 0, "doing": "", "waits": False, "still": still, "where": "",
                "memory": None, "lag": None}  # fmt: skip
    lag = None if beat.busy is None else round(beat.busy - fastest, 6)  # seconds of a step, behind the fastest
    return {"rank": seen.rank, "host": beat.host, "step": beat.step, "doing": beat.doing, "waits": beat.waits,
            "still": still, "where": beat.where, "memory": beat.memory, "lag": lag}  # fmt: skip


def _short(value: Any) -> Any:
    return f"{value[:_LONGEST_TEXT]} ..." if isinstance(value, str) and len(value) > _LONGEST_TEXT else value
