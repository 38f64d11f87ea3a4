"""timeline.jsonl: what a run did when, all of its starts and restarts included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.records import number, read_lines, text, whole

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
