"""The time of the steps of a trace by region, on the host's clock: a file beside the trace, and a table of it.

On a GPU, work is queued in one region and done in a later one, which the trace shows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.plain import columns
from lockstep.config.schema import REGIONS

FILE = "shares.json"
OTHER = "other"
_RANKS = 16  # shown, of more


class Shares:
    """Counts the seconds of one rank by region. A region inside another counts for itself alone."""

    def __init__(self) -> None:
        self._within: list[str | None] = [None]
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def enter(self, region: str | None) -> None:
        self._account()
        self._within[0] = region

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        self._account()
        self._within.append(name)
        try:
            yield
        finally:
            self._account()
            self._within.pop()

    def end(self) -> None:
        """Stops counting, before the trace is written."""
        self._account()

    def write(self, folder: Path, first: int, last: int) -> None:
        record = {"first_step": first, "last_step": last, "seconds": self._seconds}
        run_files.write(folder / FILE, json.dumps(record) + "\n", depth=3)

    def _account(self) -> None:
        now = time.perf_counter()
        name = self._within[-1] or OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def table(profiles: Path) -> list[str]:
    """Returns a line per rank: the percentage of every region, and the time of a step."""
    found = sorted((rank, record) for each in profiles.glob("proc_*") if (record := _read(each)) is not None
                   for rank in [int(each.name.removeprefix("proc_"))])  # fmt: skip
    if not found:
        return []
    names = {name for _, record in found for name in record["seconds"]}
    known = [name for name in REGIONS if name in names]
    regions = [*known, *sorted(names - {*known, OTHER}), *([OTHER] if OTHER in names else [])]
    rows: list[Sequence[str]] = [("rank", *regions, "a step")]
    rows += [_row(rank, record, regions) for rank, record in found[:_RANKS]]
    more = [f"and {len(found) - _RANKS} more ranks"] if len(found) > _RANKS else []
    first, last = found[0][1]["first_step"], found[0][1]["last_step"]
    return [f"time of steps {first} to {last}, by the clock of the host:", *columns(rows), *more]


def _row(rank: int, record: dict[str, Any], regions: Sequence[str]) -> tuple[str, ...]:
    total = sum(record["seconds"].values()) or 1.0
    shares = [f"{100 * record['seconds'].get(name, 0.0) / total:.0f} %" for name in regions]
    steps = max(record["last_step"] - record["first_step"] + 1, 1)
    return (str(rank), *shares, f"{1000 * total / steps:.3g} ms")


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        int(folder.name.removeprefix("proc_"))
        record = json.loads(run_files.read_text(folder / FILE, depth=3))
        seconds = {str(name): float(value) for name, value in record["seconds"].items()}
        return {"seconds": seconds, "first_step": int(record["first_step"]), "last_step": int(record["last_step"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
