"""lags.jsonl: how much longer than the fastest each rank took for a step, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.records import number, read_lines, whole


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
