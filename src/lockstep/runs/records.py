"""JSON that others wrote, and may be writing: whole files and lines of them, as far as they can be read."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.record.timeline import LIVE_FILE


def read_json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where there is none, or half of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(run_files.read_text(file))
        return found if isinstance(found, dict) else {}
    return {}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is no object, as a last line that is still being written, is left
    out."""
    decode = json.JSONDecoder().decode  # there may be a hundred thousand of them
    with contextlib.suppress(OSError), run_files.open_file(file) as stream:
        for _, line in run_files.lines(stream):
            try:
                found = decode(line.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def number(value: Any) -> float | None:
    """A finite number, or none."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    return value if type(value) is int else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Lags:
    """A column per stretch of time, a value per rank: seconds of a step that the rank was behind the fastest."""

    begins: tuple[float, ...] = ()  # unix seconds
    ends: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    behind: tuple[tuple[float, ...], ...] = ()
    ranks_in_a_row: int = 1  # of so many ranks, and columns, each value is that of the slowest
    merged: int = 1

    def __bool__(self) -> bool:
        return bool(self.ends)


def read_lags(folder: Path) -> Lags:
    begins, ends, steps, behind = [], [], [], []
    for told in read_lines(folder / "lags.jsonl"):
        at, since, busy = number(told.get("at")), number(told.get("since")), told.get("busy")
        if at is None or not isinstance(busy, list) or not busy:
            continue
        values = [number(each) or 0.0 for each in busy]
        fastest = min(values)
        begins.append(at if since is None else since)
        ends.append(at)
        steps.append(whole(told.get("step")) or 0)
        behind.append(tuple(each - fastest for each in values))
    return Lags(tuple(begins), tuple(ends), tuple(steps), tuple(behind))


def thinned(lags: Lags, cells: int, most_rows: int = 128) -> Lags:
    """With no more values than so many: the slowest of neighbouring ranks, and of neighbouring stretches of time."""
    if not lags:
        return lags
    ranks = max(map(len, lags.behind))
    group = -(-ranks // most_rows)
    rows = -(-ranks // group)
    merged = max(-(-len(lags.ends) * rows // cells), 1)
    behind = [_grouped(column, group, rows) for column in lags.behind]
    starts = range(0, len(behind), merged)
    return Lags(
        begins=tuple(lags.begins[at] for at in starts),
        ends=tuple(lags.ends[min(at + merged, len(behind)) - 1] for at in starts),
        steps=tuple(lags.steps[min(at + merged, len(behind)) - 1] for at in starts),
        behind=tuple(tuple(map(max, zip(*behind[at : at + merged], strict=True))) for at in starts),
        ranks_in_a_row=group,
        merged=merged,
    )


def typical(lags: Lags) -> list[float]:
    """By rank, the middle of what it was behind: what it is behind for a moment says little of a rank."""
    if not lags:
        return []
    ranks = len(lags.behind[-1])
    columns = [column for column in lags.behind if len(column) == ranks]  # of the newest number of ranks
    return [sorted(column[rank] for column in columns)[len(columns) // 2] for rank in range(ranks)]


def _grouped(column: Sequence[float], group: int, rows: int) -> list[float]:
    found = [max(column[at : at + group]) for at in range(0, len(column), group)]
    return [*found, *([0.0] * (rows - len(found)))]


@dataclass(frozen=True)
class LiveRank:
    """One rank. `lag` is how many seconds of a step it is behind the fastest, `still` how long it has not got on."""

    rank: int
    host: str = ""
    step: int = 0  # under way
    doing: str = ""
    waits: bool = False  # for other ranks
    still: float = 0.0
    where: str = ""  # the line of the user's code, where it has been there for a while
    memory: int | None = None  # bytes: the most of its device so far, or what its process holds on a CPU
    lag: float | None = None


@dataclass(frozen=True)
class Live:
    """All ranks at one moment."""

    at: float  # unix seconds
    world_size: int
    step: int
    total_steps: int | None
    ranks: tuple[LiveRank, ...]
    latest: Mapping[str, Any] = field(default_factory=dict)  # the newest row of metrics

    def age(self, now: float | None = None) -> float:
        """Seconds since it was written: more than a few say that nobody writes it any more."""
        return max((time.time() if now is None else now) - self.at, 0.0)


def read_live(folder: Path) -> Live | None:
    """What a run's live.json says; None where there is none, or nothing that makes sense."""
    return live_of(read_json(folder / LIVE_FILE))


def live_of(told: Mapping[str, Any]) -> Live | None:
    at, ranks = number(told.get("at")), told.get("ranks")
    if at is None or not isinstance(ranks, list):
        return None
    found = tuple(_rank(each) for each in ranks if isinstance(each, dict) and whole(each.get("rank")) is not None)
    latest = told.get("latest")
    return Live(
        at=at,
        world_size=whole(told.get("world_size")) or len(found),
        step=whole(told.get("step")) or 0,
        total_steps=whole(told.get("total_steps")),
        ranks=tuple(sorted(found, key=lambda each: each.rank)),
        latest=latest if isinstance(latest, dict) else {},
    )


def _rank(told: Mapping[str, Any]) -> LiveRank:
    return LiveRank(
        rank=told["rank"],
        host=text(told.get("host")),
        step=whole(told.get("step")) or 0,
        doing=text(told.get("doing")),
        waits=told.get("waits") is True,
        still=number(told.get("still")) or 0.0,
        where=text(told.get("where")),
        memory=whole(told.get("memory")),
        lag=number(told.get("lag")),
    )


# Where a run is until the next of these, beside what has an end of its own in the midst of it.
_BASES = ("start", "train", "restart")
SPANS = ("roll call", "compile", "validate", "save")
# What the time of a run is divided into, in the order in which it is told.
PHASES = ("start", "roll call", "compile", "train", "validate", "save", "restart")


@dataclass(frozen=True)
class Entry:
    """A phase that began `at` and is over, goes on until another begins, or something that happened then."""

    at: float  # unix seconds
    kind: str
    until: float | None = None
    step: int | None = None
    rank: int | None = None
    host: str = ""
    note: str = ""
    status: str = ""  # of an end
    traceback: str = ""
    world_size: int | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of a run's time; `step` is the one that it began at, where that is known."""

    kind: str
    begin: float
    end: float
    step: int | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def read_timeline(folder: Path) -> list[Entry]:
    """All entries, oldest first. A driver that shares no disk with rank 0 writes a file of its own."""
    found = [entry for file in sorted(folder.glob("timeline*.jsonl")) for entry in _entries(file)]
    return sorted(found, key=lambda each: each.at)


def _entries(file: Path) -> Iterator[Entry]:
    for told in read_lines(file):
        at, kind = number(told.get("at")), text(told.get("kind"))
        if at is None or not kind:
            continue
        yield Entry(
            at=at,
            kind=kind,
            until=number(told.get("until")),
            step=whole(told.get("step")),
            rank=whole(told.get("rank")),
            host=text(told.get("host")),
            note=text(told.get("note")),
            status=text(told.get("status")),
            traceback=text(told.get("traceback")),
            world_size=whole(told.get("world_size")),
            attempt=whole(told.get("attempt")),
        )


def spans_of(entries: Sequence[Entry], until: float | None = None) -> list[Span]:
    """The time of a run divided into phases, without overlaps; between an end and the next start there is nothing.

    `until` is how far a run that has not said its end is known to have come.
    """
    last = max((each.until or each.at for each in entries), default=0.0)
    horizon = max(last, until or 0.0)
    bases = []
    marks = [each for each in entries if each.kind in (*_BASES, "end")]
    for index, entry in enumerate(marks):
        end = marks[index + 1].at if index + 1 < len(marks) else horizon
        if entry.kind != "end" and end > entry.at:
            bases.append(Span(entry.kind, entry.at, end, entry.step, entry.note if entry.kind == "restart" else ""))
    inside = [
        Span(each.kind, each.at, each.until, each.step, each.note)
        for each in entries
        if each.kind in SPANS and each.until is not None and each.until > each.at
    ]
    return sorted(_around(bases, inside), key=lambda each: each.begin)


def _around(bases: Sequence[Span], inside: Sequence[Span]) -> Iterator[Span]:
    """Both, with the bases cut where something is in the midst of them, and what overlaps cut to what came first."""
    free: list[Span] = []
    for each in sorted(inside, key=lambda span: (span.begin, -span.end)):
        begin = max(each.begin, free[-1].end) if free else each.begin
        if each.end > begin:
            free.append(Span(each.kind, begin, each.end, each.step, each.note))
    yield from free
    position = 0
    for base in bases:
        begin = base.begin
        while position < len(free) and free[position].end <= begin:
            position += 1
        at = position
        while at < len(free) and free[at].begin < base.end:
            if free[at].begin > begin:
                yield Span(base.kind, begin, free[at].begin, base.step, base.note)
            begin = max(begin, free[at].end)
            at += 1
        if base.end > begin:
            yield Span(base.kind, begin, base.end, base.step, base.note)


def seconds_by_kind(spans: Sequence[Span]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in spans:
        found[each.kind] = found.get(each.kind, 0.0) + each.seconds
    return {kind: found[kind] for kind in (*PHASES, *found) if kind in found}
