"""Where a rank is at this moment: the step, what it is doing or waiting for, and since when.

Written by the training thread as it goes, at the price of an assignment; read by the thread that sends the heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from time import monotonic
from types import FrameType
from typing import NamedTuple

_LONGEST_TEXT = 2000
_COUNTS = ("total_steps", "memory")

STARTING, LEFT = "starting", "done"


class Moment(NamedTuple):
    """One place in the program."""

    number: int
    step: int
    doing: str
    waits: bool  # only other ranks can bring this one on
    first: bool  # never done before by this process, so it may have to compile or to fetch
    since: float  # by this process's monotonic clock
    limit: float  # how long it may take, where that is longer than usual


class Activity:
    """Always holds one whole moment, so that another thread never sees half of one.

    It is noted several times in every step, so it is noted as a bare tuple: that takes a third of the time.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience  # how long may be taken by what is not known to be short
        self.begun = False  # whether there was a step: before the first, nothing can be lost
        self.restores = False  # whether run.restore was called
        self.exchanges = 0  # exchanges with all other ranks that this one has begun
        self.total_steps: int | None = None  # how many there will be, where that is known
        self.memory: int | None = None  # the most bytes of its device so far, as the training thread last asked
        self.busy: float | None = None  # seconds of a step before this rank was ready to exchange gradients, of late
        # Finds, by the stacks of threads, the part of a model that this rank is in, and whether it waits for others.
        self.locate: Callable[[Sequence[FrameType]], tuple[str, bool] | None] = lambda stacks: None
        self._known = {STARTING}
        self._now: tuple[int, int, str, bool, bool, float, float] = (0, 0, STARTING, False, True, monotonic(), 0.0)

    @property
    def now(self) -> Moment:
        return Moment(*self._now)

    def enter(self, doing: str, step: int | None = None, waits: bool = False, limit: float = 0.0) -> None:
        """From here on this rank is doing something else, or the same once more: either is progress."""
        before = self._now
        first = doing not in self._known
        if first:
            self._known.add(doing)
        if waits:
            self.exchanges += 1
        self._now = (before[0] + 1, before[1] if step is None else step, doing, waits, first, monotonic(), limit)

    def progress(self) -> None:
        """Still doing the same, and getting on with it."""
        before = self._now
        self._now = (before[0] + 1, *before[1:5], monotonic(), before[6])

    def be_patient(self) -> None:
        """What this rank is doing takes longer than usual this time."""
        self._now = (*self._now[:6], self.patience)

    def go_back(self, before: Moment) -> None:
        """From here on this rank is doing again what it did before."""
        self._now = (self._now[0] + 1, *before[1:5], monotonic(), before.limit)

    @contextlib.contextmanager
    def within(self, doing: str, waits: bool = False, limit: float = 0.0) -> Iterator[None]:
        """Something that this rank does, or waits for, in the midst of something else."""
        number, step, *_ = before = self._now
        self._now = (number + 1, step, doing, waits, False, monotonic(), limit)
        try:
            yield
        finally:
            self.go_back(Moment(*before))


@dataclass(frozen=True)
class Beat:
    """What a rank lets others know of its activity."""

    count: int  # beats so far: a new one shows that the process is alive
    number: int  # of the moment: a new one is progress
    step: int
    doing: str
    waits: bool
    first: bool
    limit: float
    still: float  # seconds since that moment began, by the rank's own clock
    where: str  # the line of the user's code that the rank is in, where it has been there for a while
    begun: bool = False  # whether it has made a step
    restores: bool = False  # whether it has called run.restore
    exchanges: int = 0  # exchanges of gradients or parameters that it has begun
    # For whoever looks at the run, and nobody else:
    host: str = ""
    total_steps: int | None = None
    busy: float | None = None  # seconds of a step before the rank was ready to exchange gradients
    memory: int | None = None  # bytes: the most of its device so far, or what its process holds on a CPU

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Beat | None:
        """None for what is no beat: it came over a network."""
        if data is None:
            return None
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(told, dict) or set(told) != {each.name for each in fields(cls)}:
            return None
        whole, numbers = ("count", "number", "step", "exchanges"), ("limit", "still")
        sound = (
            all(type(told[name]) is int and told[name] >= 0 for name in whole)
            and all(type(told[name]) in (int, float) and told[name] >= 0 for name in numbers)  # also infinite
            and all(type(told[name]) is bool for name in ("waits", "first", "begun", "restores"))
            and all(type(told[name]) is str and len(told[name]) <= _LONGEST_TEXT for name in ("doing", "where", "host"))
            and all(told[name] is None or (type(told[name]) is int and told[name] >= 0) for name in _COUNTS)
            and (told["busy"] is None or (type(told["busy"]) in (int, float) and told["busy"] >= 0))
        )
        if not sound:
            return None
        floats = [name for name in (*numbers, "busy") if told[name] is not None]
        return cls(**{**told, **{name: _as_float(told[name]) for name in floats}})

    @property
    def at(self) -> str:
        """`loss of step 3`; what has a name of its own (in quotes) says the step itself, if there is one."""
        return self.doing if self.doing.startswith(("'", '"')) or not self.step else f"{self.doing} of step {self.step}"

    @property
    def left(self) -> bool:
        """Whether the rank has done its work and is gone."""
        return self.doing == LEFT

    def describe(self) -> str:
        """`waits in gradient reduction of step 118`, `in loss of step 3, train.py:42`."""
        verb = "waits in" if self.waits else "in"
        return f"{verb} {self.at}{f', {self.where}' if self.where and not self.waits else ''}"


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def beat_key(rank: int) -> str:
    return f"beats/{rank}"
