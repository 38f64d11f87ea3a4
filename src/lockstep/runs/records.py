"""The JSON files of a run's folder, read while others may be writing them: metrics, timeline, lags and live.json.

Nothing here raises for a file that is missing, half written or nonsense: what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from lockstep import run_files
from lockstep.config.plain import number, text, whole
from lockstep.record.timeline import LIVE_FILE
from lockstep.record.writers import METRICS_FILE, json_lines, objects, read_json

# A run is in one of these until the next begins; SPANS have their own end within them.
_BASES = ("start", "train", "restart")
SPANS = ("roll call", "compile", "validate", "save")
# The phases of a run's time, in the order in which they are shown.
PHASES = ("start", "roll call", "compile", "train", "validate", "save", "restart")

NOT_METRICS = ("step", "epoch")  # in a row of metrics
_LONGEST_ROW = 1_000_000  # bytes

Record = TypeVar("Record")


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines, none where it cannot be read."""
    with contextlib.suppress(OSError):
        yield from json_lines(file)


def parsed(cls: type[Record], found: Mapping[str, Any]) -> Record:
    """Makes a dataclass of numbers, texts and flags from JSON; values of another type are left at their defaults."""
    kinds = {each.name: str(each.type).removesuffix(" | None") for each in fields(cls)}  # type: ignore[arg-type]
    values = {name: _READ[kind](found.get(name)) for name, kind in kinds.items() if kind in _READ}
    return cls(**{name: value for name, value in values.items() if value is not None})


_READ: dict[str, Callable[[Any], Any]] = {
    "int": whole,
    "float": number,
    "str": lambda value: value if isinstance(value, str) else None,
    "bool": lambda value: value is True,
}


@dataclass
class Curve:
    """The values of one metric, in the order of their steps."""

    name: str
    steps: MutableSequence[float] = field(default_factory=lambda: array("d"))
    values: MutableSequence[float] = field(default_factory=lambda: array("d"))
    not_finite: MutableSequence[float] = field(default_factory=lambda: array("d"))  # steps at which it was no number


def read_curves(folder: Path) -> dict[str, Curve]:
    """Returns all numbers of a run by name. Its rows may be millions, so none is kept."""
    found: dict[str, Curve] = {}
    for row in read_lines(folder / METRICS_FILE):
        if (step := number(row.get("step"))) is None:
            continue
        for name, value in row.items():
            if name in NOT_METRICS or isinstance(value, (str, list, dict, bool)):
                continue
            if (curve := found.get(name)) is None:
                curve = found[name] = Curve(name)
            if (point := number(value)) is not None:
                curve.steps.append(step)
                curve.values.append(point)
            else:
                curve.not_finite.append(step)
    return found


def newest_row(file: Path) -> dict[str, Any]:
    """Returns the last row of a file that may be long, and may be written to; empty where there is none."""
    return (newest_rows(file, 16_384) or newest_rows(file, _LONGEST_ROW) or [{}])[-1]


def newest_rows(file: Path, longest: int) -> list[dict[str, Any]]:
    """Returns the rows in the last bytes of a file."""
    with contextlib.suppress(OSError), run_files.open_file(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - longest, 0))
        return list(objects(stream.read(longest).split(b"\n")[0 if size <= longest else 1 :]))
    return []


@dataclass(frozen=True)
class Lags:
    """A column per stretch of time, a value per rank: seconds of a step that the rank was behind the fastest."""

    begins: tuple[float, ...] = ()  # unix seconds
    ends: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    behind: tuple[tuple[float, ...], ...] = ()
    ranks_in_a_row: int = 1  # each value is that of the slowest of so many ranks, and of so many columns
    merged: int = 1

    def __bool__(self) -> bool:
        return bool(self.ends)


def read_lags(folder: Path) -> Lags:
    begins, ends, steps, behind = [], [], [], []
    for line in read_lines(folder / "lags.jsonl"):
        at, since, busy = number(line.get("at")), number(line.get("since")), line.get("busy")
        if at is None or not isinstance(busy, list) or not busy:
            continue
        values = [number(each) or 0.0 for each in busy]
        begins.append(at if since is None else since)
        ends.append(at)
        steps.append(whole(line.get("step")) or 0)
        behind.append(tuple(each - min(values) for each in values))
    return Lags(tuple(begins), tuple(ends), tuple(steps), tuple(behind))


def thinned_lags(lags: Lags, cells: int, most_rows: int = 128) -> Lags:
    """Returns at most so many values: the slowest of neighbouring ranks, and of neighbouring stretches of time."""
    if not lags:
        return lags
    ranks = max(map(len, lags.behind))
    group = -(-ranks // most_rows)
    rows = -(-ranks // group)
    merged = max(-(-len(lags.ends) * rows // cells), 1)
    behind = []
    for column in lags.behind:
        grouped = [max(column[at : at + group]) for at in range(0, len(column), group)]
        behind.append([*grouped, *([0.0] * (rows - len(grouped)))])
    starts = range(0, len(behind), merged)
    lasts = [min(at + merged, len(behind)) - 1 for at in starts]
    return Lags(
        begins=tuple(lags.begins[at] for at in starts),
        ends=tuple(lags.ends[at] for at in lasts),
        steps=tuple(lags.steps[at] for at in lasts),
        behind=tuple(tuple(map(max, zip(*behind[at : at + merged], strict=True))) for at in starts),
        ranks_in_a_row=group,
        merged=merged,
    )


def typical_lags(lags: Lags) -> list[float]:
    """Returns the median lag of each rank, over the columns with the newest number of ranks."""
    if not lags:
        return []
    ranks = len(lags.behind[-1])
    columns = [column for column in lags.behind if len(column) == ranks]
    return [sorted(column[rank] for column in columns)[len(columns) // 2] for rank in range(ranks)]


@dataclass(frozen=True)
class LiveRank:
    """One rank. `lag` is how many seconds of a step it is behind the fastest, `still` how long it made no progress."""

    rank: int
    host: str = ""
    step: int = 0  # under way
    doing: str = ""
    waits: bool = False  # for other ranks
    still: float = 0.0
    where: str = ""  # the line of the user's code, where it has been there for a while
    memory: int | None = None  # bytes: the peak of its device, or what its process holds on a CPU
    lag: float | None = None


@dataclass(frozen=True)
class Live:
    """All ranks at one moment."""

    at: float  # unix seconds
    step: int = 0
    total_steps: int | None = None
    ranks: tuple[LiveRank, ...] = ()

    def age(self, now: float | None = None) -> float:
        """Returns the seconds since it was written, which is done about once a second."""
        return max((time.time() if now is None else now) - self.at, 0.0)


def read_live(folder: Path) -> Live | None:
    return live_of(read_json(folder / LIVE_FILE))


def live_of(found: Mapping[str, Any]) -> Live | None:
    at, ranks = number(found.get("at")), found.get("ranks")
    if at is None or not isinstance(ranks, list):
        return None
    known = [parsed(LiveRank, each) for each in ranks if isinstance(each, dict) and whole(each.get("rank")) is not None]
    return Live(
        at=at,
        step=whole(found.get("step")) or 0,
        total_steps=whole(found.get("total_steps")),
        ranks=tuple(sorted(known, key=lambda each: each.rank)),
    )


@dataclass(frozen=True)
class Entry:
    """A phase that began `at` and is over, lasts until another begins, or something that happened then."""

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
    """Returns all entries, oldest first. A driver that shares no disk with rank 0 writes its own file."""
    lines = (line for file in sorted(folder.glob("timeline*.jsonl")) for line in read_lines(file))
    found = [parsed(Entry, line) for line in lines if number(line.get("at")) is not None and text(line.get("kind"))]
    return sorted(found, key=lambda each: each.at)


def spans_of(entries: Sequence[Entry], until: float | None = None) -> list[Span]:
    """Divides the time of a run into phases without overlaps; between an end and the next start there is none.

    `until` is when a run that has not ended was last heard of.
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
    """Yields both, the bases cut around what is inside them, and overlaps cut to what came first."""
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
