"""What `lockstep watch` shows: one look at a run, as plain data that also travels between hosts, and as text."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.record import folder_lock, run_folder
from lockstep.runs.findings import duration, first_line
from lockstep.runs.reader import LOST, holder_is_there, status_of
from lockstep.runs.records import (
    Entry,
    Live,
    LiveRank,
    live_of,
    number,
    read_json,
    read_live,
    read_timeline,
    text,
    whole,
)
from lockstep.shown import brief, in_a_line, size

# live.json is written about once a second: later than this, nobody writes it any more, or the disk does not answer.
STALE_SECONDS = 10.0
# A rank that does not get on for less than this is not worth mentioning.
_STILL_SECONDS = 5.0
_POINTS = 60  # of a sparkline
_TAIL_BYTES = 262_144  # of metrics.jsonl, for them
_NAMES = 8  # metrics
_RANKS = 16  # shown, of more those that are furthest behind
_NOT_METRICS = ("step", "epoch")
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    folder: str
    name: str
    status: str  # as `lockstep runs` has it; "" where there is no run yet
    reason: str
    step: int
    total_steps: int | None
    seconds_left: float | None
    age: float | None  # of live.json, in seconds; None where there is none
    live: Live | None
    series: Mapping[str, Sequence[float]]  # the newest values of every metric
    latest: Mapping[str, float]

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
        return {**asdict(self), "live": None if self.live is None else asdict(self.live)}


def look(folder: Path, now: float | None = None) -> Look:
    """What is known of a run now; of a folder that is not there yet, nothing."""
    now = time.time() if now is None else now
    summary, live, timeline = read_json(folder / run_folder.SUMMARY_FILE), read_live(folder), read_timeline(folder)
    at_work = True if folder_lock.held_by(folder) is not None else holder_is_there(folder)
    # Before there is any word of it, a run waits for its job; the lock is what is taken first.
    status = status_of(summary, timeline, live, now, at_work) if summary or timeline else ""
    rows = _newest_rows(folder / "metrics.jsonl")
    steps = [whole(summary.get("step")) if status != run_folder.RUNNING else None, live.step if live else None]
    step = max((each for each in steps if each is not None), default=0)
    return Look(
        folder=str(folder),
        name=folder.resolve().name,
        status=status,
        reason=first_line(text(summary.get("reason"))) if status != run_folder.RUNNING else "",
        step=step,
        total_steps=live.total_steps if live else None,
        seconds_left=_seconds_left(timeline, live) if status == run_folder.RUNNING else None,
        age=None if live is None else live.age(now),
        live=live,
        series=_series(rows),
        latest=_latest(rows),
    )


def look_of(told: Mapping[str, Any]) -> Look:
    """The same from its plain form, as another host sent it."""
    series, latest = told.get("series"), told.get("latest")
    live = told.get("live")
    return Look(
        folder=text(told.get("folder")),
        name=text(told.get("name")),
        status=text(told.get("status")),
        reason=text(told.get("reason")),
        step=whole(told.get("step")) or 0,
        total_steps=whole(told.get("total_steps")),
        seconds_left=number(told.get("seconds_left")),
        age=number(told.get("age")),
        live=live_of(live) if isinstance(live, dict) else None,
        series={str(name): [each for each in map(number, values) if each is not None]
                for name, values in series.items() if isinstance(values, list)} if isinstance(series, dict) else {},
        latest={str(name): value for name, each in latest.items() if (value := number(each)) is not None}
        if isinstance(latest, dict) else {},
    )  # fmt: skip


def sparkline(values: Sequence[float], plain: bool = False) -> str:
    """Values as bars, from the least to the most of them."""
    bars = _PLAIN_BARS if plain else _BARS
    shown = values[-_POINTS:]
    if not shown:
        return ""
    least, most = min(shown), max(shown)
    span = most - least
    return "".join(bars[round((each - least) / span * (len(bars) - 1)) if span else 0] for each in shown)


def headline(seen: Look) -> str:
    """How the run is, in a line."""
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
    """The same with the newest numbers and with who is behind, where there is no terminal to draw on."""
    parts = [headline(seen), *(f"{name} {value:.4g}" for name, value in list(seen.latest.items())[:_NAMES])]
    if seen.live is not None and not seen.has_ended:
        parts += [f"rank {each.rank}: {doing(each)}" for each in seen.live.ranks if each.still > _STILL_SECONDS][:4]
    return in_a_line("  ".join(parts))


def ranks_shown(live: Live) -> tuple[list[LiveRank], int]:
    """The ranks that have room, those that do not get on first among them, and how many are left out."""
    if len(live.ranks) <= _RANKS:
        return list(live.ranks), 0
    worst = sorted(live.ranks, key=lambda each: (-each.still if each.still > _STILL_SECONDS else 0, -(each.lag or 0.0)))
    return sorted(worst[:_RANKS], key=lambda each: each.rank), len(live.ranks) - _RANKS


def rank_cells(rank: LiveRank) -> tuple[str, ...]:
    """Rank, host, step, what it does, memory, lag."""
    lag = "" if rank.lag is None else "fastest" if rank.lag <= 0 else f"+{rank.lag * 1000:.3g} ms"
    memory = "" if rank.memory is None else size(rank.memory)
    return (str(rank.rank), in_a_line(rank.host), str(rank.step), doing(rank), memory, lag)


def doing(rank: LiveRank) -> str:
    told = rank.doing or "starting"
    if rank.waits:
        told = f"waits for others: {told}"
    if rank.still > _STILL_SECONDS:
        told += f", for {duration(rank.still)}" + (f", at {brief(rank.where, 60)}" if rank.where else "")
    return in_a_line(told)


def _seconds_left(timeline: Sequence[Entry], live: Live | None) -> float | None:
    """By the steps that were made since training began, or went on."""
    began = next((each for each in reversed(timeline) if each.kind == "train"), None)
    if live is None or not live.total_steps or began is None:
        return None
    made, took = live.step - 1 - (began.step or 0), live.at - began.at
    return took / made * (live.total_steps - live.step + 1) if made > 0 and took > 0 else None


def _newest_rows(file: Path) -> list[dict[str, Any]]:
    """Rows from the end of a file that may be long."""
    import json

    rows = []
    try:
        with run_files.open_file(file) as stream:
            length = stream.seek(0, os.SEEK_END)
            stream.seek(max(length - _TAIL_BYTES, 0))
            lines = stream.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    for each in lines if length <= _TAIL_BYTES else lines[1:]:
        try:
            row = json.loads(each)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_METRICS and (known := number(value)) is not None:
                found.setdefault(name, []).append(known)
    # Losses and metrics before what is logged beside them.
    ordered = sorted(found, key=lambda name: "/" not in name)
    return {name: found[name][-_POINTS:] for name in ordered[:_NAMES]}


def _latest(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: values[-1] for name, values in _series(rows).items()}
