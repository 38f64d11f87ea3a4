"""One look at a run for `lockstep watch`: as data, which also travels between hosts, and as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config.plain import number, text, whole
from lockstep.record import run_folder
from lockstep.record.writers import METRICS_FILE
from lockstep.runs.findings import duration, first_line
from lockstep.runs.reader import LOST, QUEUED, read_state
from lockstep.runs.records import NOT_METRICS, Entry, Live, LiveRank, live_of, newest_rows, parsed
from lockstep.shown import brief, in_a_line, size

STALE_SECONDS = 10.0  # without a new live.json, which is written about once a second
_STILL_SECONDS = 5.0  # without progress, before a rank is mentioned
_POINTS = 60  # in a sparkline
_TAIL_BYTES = 262_144  # read from the end of metrics.jsonl
_NAMES = 8  # metrics
_RANKS = 16  # shown, of more those that are furthest behind
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    folder: str = ""
    name: str = ""
    status: str = ""  # as in `lockstep runs`; empty before there is a run
    reason: str = ""
    step: int = 0
    total_steps: int | None = None
    seconds_left: float | None = None
    age: float | None = None  # of live.json, in seconds
    live: Live | None = None
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)  # the newest values of every metric
    latest: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        return self.live is not None or self.has_ended

    @property
    def has_ended(self) -> bool:
        return self.status not in ("", run_folder.RUNNING)

    @property
    def is_stale(self) -> bool:
        return not self.has_ended and self.age is not None and self.age > STALE_SECONDS

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def look(folder: Path, now: float | None = None) -> Look:
    """Returns what is known of a run now, which is nothing for a folder that does not exist yet."""
    now = time.time() if now is None else now
    state = read_state(folder, now)
    status, live, running = state.status, state.live, state.status == run_folder.RUNNING
    series = _series(newest_rows(folder / METRICS_FILE, _TAIL_BYTES))
    steps = [None if running else whole(state.summary.get("step")), live.step if live else None]
    return Look(
        folder=str(folder),
        name=folder.resolve().name,
        status="" if status == QUEUED else status,
        reason="" if running else first_line(text(state.summary.get("reason"))),
        step=max((each for each in steps if each is not None), default=0),
        total_steps=live.total_steps if live else None,
        seconds_left=_seconds_left(state.timeline, live) if running else None,
        age=None if live is None else live.age(now),
        live=live,
        series=series,
        latest={name: values[-1] for name, values in series.items()},
    )


def look_of(found: Mapping[str, Any]) -> Look:
    """Returns a look from its plain form, as another host sent it."""
    live, series, latest = (
        each if isinstance(each, dict) else {} for each in map(found.get, ("live", "series", "latest"))
    )
    return replace(
        parsed(Look, found),
        live=live_of(live),
        series={
            str(name): [each for each in map(number, values) if each is not None]
            for name, values in series.items()
            if isinstance(values, list)
        },
        latest={str(name): value for name, each in latest.items() if (value := number(each)) is not None},
    )


def sparkline(values: Sequence[float]) -> str:
    shown = values[-_POINTS:]
    if not shown:
        return ""
    least, most = min(shown), max(shown)
    span = most - least
    return "".join(_BARS[round((each - least) / span * (len(_BARS) - 1)) if span else 0] for each in shown)


def headline(seen: Look) -> str:
    of = f" of {seen.total_steps}" if seen.total_steps else ""
    if not seen.has_begun:
        return f"{seen.name}: has not begun"
    if seen.status == LOST:
        return f"{seen.name}: lost at step {seen.step}{of}: its process is gone, and it never said how it ended"
    if seen.has_ended:
        return f"{seen.name}: {seen.status} at step {seen.step}{of}" + (f": {seen.reason}" if seen.reason else "")
    left = f"  {duration(seen.seconds_left)} left" if seen.seconds_left is not None else ""
    if seen.is_stale:
        left = f"  nothing was heard of it for {duration(seen.age or 0.0)}"
    return f"{seen.name}: step {seen.step}{of}{left}"


def line(seen: Look) -> str:
    """Returns the headline with the newest numbers and the ranks that make no progress."""
    parts = [headline(seen), *(f"{name} {value:.4g}" for name, value in list(seen.latest.items())[:_NAMES])]
    if seen.live is not None and not seen.has_ended:
        parts += [f"rank {each.rank}: {doing(each)}" for each in seen.live.ranks if each.still > _STILL_SECONDS][:4]
    return in_a_line("  ".join(parts))


def ranks_shown(live: Live) -> tuple[list[LiveRank], int]:
    """Returns the ranks to show, preferring those without progress, and how many are left out."""
    if len(live.ranks) <= _RANKS:
        return list(live.ranks), 0
    worst = sorted(live.ranks, key=lambda each: (-each.still if each.still > _STILL_SECONDS else 0, -(each.lag or 0.0)))
    return sorted(worst[:_RANKS], key=lambda each: each.rank), len(live.ranks) - _RANKS


def rank_cells(rank: LiveRank) -> tuple[str, ...]:
    lag = "" if rank.lag is None else "fastest" if rank.lag <= 0 else f"+{rank.lag * 1000:.3g} ms"
    memory = "" if rank.memory is None else size(rank.memory)
    return (str(rank.rank), in_a_line(rank.host), str(rank.step), doing(rank), memory, lag)


def doing(rank: LiveRank) -> str:
    words = rank.doing or "starting"
    if rank.waits:
        words = f"waits for others: {words}"
    if rank.still > _STILL_SECONDS:
        words += f", for {duration(rank.still)}" + (f", at {brief(rank.where, 60)}" if rank.where else "")
    return in_a_line(words)


def _seconds_left(timeline: Sequence[Entry], live: Live | None) -> float | None:
    began = next((each for each in reversed(timeline) if each.kind == "train"), None)
    if live is None or not live.total_steps or began is None:
        return None
    made, took = live.step - 1 - (began.step or 0), live.at - began.at
    return took / made * (live.total_steps - live.step + 1) if made > 0 and took > 0 else None


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in NOT_METRICS and (known := number(value)) is not None:
                found.setdefault(name, []).append(known)
    # Losses and metrics before what is logged beside them.
    ordered = sorted(found, key=lambda name: "/" not in name)
    return {name: found[name][-_POINTS:] for name in ordered[:_NAMES]}
