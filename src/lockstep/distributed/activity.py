"""What a rank is doing at this moment, for how long, and the heartbeat that reports it.

The training thread writes it, which costs an assignment; the heartbeat thread reads it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from types import FrameType
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Text = Annotated[str, Field(max_length=2000)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]  # also infinite

STARTING, LEFT = "starting", "done"


class Moment(NamedTuple):
    """The current activity of a rank."""

    number: int
    step: int
    doing: str
    waits: bool  # for other ranks
    first: bool  # done for the first time by this process, so it may compile or download
    since: float  # by this process's monotonic clock
    limit: float  # how long it may take, if longer than usual


class Activity:
    """Holds the current moment as one tuple, so that another thread never sees half of one."""

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience  # the limit for activities that may take long
        self.begun = False  # whether there was a step
        self.restores = False  # whether run.restore was called
        self.exchanges = 0  # collectives that this rank has begun
        self.total_steps: int | None = None
        self.memory: int | None = None  # peak bytes of its device
        self.busy: float | None = None  # recent seconds per step before this rank was ready to exchange gradients
        # Finds the current part of a sharded model by the stacks of threads, and whether it waits for others.
        self.locate: Callable[[Sequence[FrameType]], tuple[str, bool] | None] = lambda stacks: None
        self._known = {STARTING}
        self._now: tuple[int, int, str, bool, bool, float, float] = (0, 0, STARTING, False, True, monotonic(), 0.0)

    @property
    def now(self) -> Moment:
        return Moment(*self._now)

    def enter(self, doing: str, step: int | None = None, waits: bool = False, limit: float = 0.0) -> None:
        """Starts another activity, or the same once more; either is progress."""
        before = self._now
        first = doing not in self._known
        if first:
            self._known.add(doing)
        if waits:
            self.exchanges += 1
        self._now = (before[0] + 1, before[1] if step is None else step, doing, waits, first, monotonic(), limit)

    def progress(self) -> None:
        """Reports progress within the same activity."""
        before = self._now
        self._now = (before[0] + 1, *before[1:5], monotonic(), before[6])

    def be_patient(self) -> None:
        """Allows the current activity the longer limit."""
        self._now = (*self._now[:6], self.patience)

    def go_back(self, before: Moment) -> None:
        """Returns to an earlier activity."""
        self._now = (self._now[0] + 1, *before[1:5], monotonic(), before.limit)

    @contextlib.contextmanager
    def within(self, doing: str, waits: bool = False, limit: float = 0.0) -> Iterator[None]:
        """Wraps an activity in the midst of another."""
        number, step, *_ = before = self._now
        self._now = (number + 1, step, doing, waits, False, monotonic(), limit)
        try:
            yield
        finally:
            self.go_back(Moment(*before))


@dataclass(frozen=True)
class Beat:
    """A rank's report of its activity."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    count: Count  # beats so far: a new one shows that the process is alive
    number: Count  # of the moment: a new one shows progress
    step: Count
    doing: Text
    waits: bool
    first: bool
    limit: Seconds
    still: Seconds  # seconds since that moment began, by the rank's own clock
    where: Text  # the line of user code, if the rank has been there for a while
    begun: bool = False
    restores: bool = False
    exchanges: Count = 0
    # For display only:
    host: Text = ""
    total_steps: Count | None = None
    busy: Seconds | None = None
    memory: Count | None = None  # peak bytes of the device, or resident bytes of the process on a CPU

    def encode(self) -> bytes:
        return encoded(asdict(self))

    @classmethod
    def decode(cls, data: bytes | None) -> Beat | None:
        """Returns None for anything but a valid beat: it came over a network."""
        try:
            return _BEATS.validate_json(data or b"")
        except ValidationError:
            return None

    @property
    def at(self) -> str:
        """Returns `loss of step 3`; a quoted name carries its own step."""
        return self.doing if self.doing.startswith(("'", '"')) or not self.step else f"{self.doing} of step {self.step}"

    @property
    def left(self) -> bool:
        return self.doing == LEFT

    def describe(self) -> str:
        """`waits in gradient reduction of step 118`, `in loss of step 3, train.py:42`."""
        verb = "waits in" if self.waits else "in"
        return f"{verb} {self.at}{f', {self.where}' if self.where and not self.waits else ''}"


_BEATS = TypeAdapter(Beat)


def encoded(plain: object) -> bytes:
    """Returns JSON. A file's name may not be text in UTF-8, which the other side would refuse."""
    return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def beat_key(rank: int) -> str:
    return f"beats/{rank}"
