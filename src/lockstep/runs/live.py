"""live.json: where every rank of a run is now, as whoever sees all heartbeats wrote it down about a second ago."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.record.timeline import LIVE_FILE
from lockstep.runs.records import number, read_json, text, whole


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
