"""The pulse: all ranks tell each other what they were asked for, and share rank 0's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.train.requests import Requests
from lockstep.train.summons import Summons

# A rank learns of a stop that another one was asked for within about this time (or one step, if that is longer).
PULSE_SECONDS = 0.5


@dataclass(frozen=True)
class Asked:
    """What any of the ranks was asked for; the same on all of them."""

    leave: str | None = None
    stop: str | None = None
    save: str | None = None


NOTHING = Asked()


class Pulse:
    """Comes every so many steps, or out of turn where steps have become slow and somebody was asked for something.

    The number of steps follows from the measured step time, so that the exchange costs a fixed small share of the
    time and not something per step; it is computed from what was exchanged, so all ranks compute the same.
    """

    def __init__(self, group: Group, requests: Requests, summons: Summons | None = None) -> None:
        self._group, self._requests, self._summons = group, requests, summons
        self._start = self._last_time = time.monotonic()
        self._last_step = 0
        self._next_step = 0
        self._every = 1
        self.exchanged = False  # whether the last beat was one at which ranks told each other
        self.clock = 0.0  # seconds of training, as all ranks know it
        self._clock_at_start = 0.0

    def start(self, step: int, clock: float) -> None:
        """Begin at a step and a clock that all ranks know, fresh or restored."""
        now = time.monotonic()
        self._start, self._last_time = now - clock, now
        self.clock = self._clock_at_start = clock
        self._last_step, self._next_step, self._every = step, step + 1, 1
        if self._summons is not None:
            self._summons.met(step, self._next_step)

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def since_start(self) -> float:
        """Seconds since this start of the run, restored or not, as all ranks know them."""
        return self.clock - self._clock_at_start

    def beat(self, step: int) -> Asked:
        """What all ranks are to do at this step, if any of them was asked for something."""
        now = time.monotonic()
        if self._group.world_size == 1:
            self.exchanged = True
            self.clock = now - self._start
            return _asked([self._take()]) if self._requests.any else NOTHING
        self.exchanged = step >= self._next_step or (self._summons is not None and self._summons.called_at(step))
        return self.meet(step) if self.exchanged else NOTHING

    def meet(self, step: int) -> Asked:
        """Tell each other now."""
        now = time.monotonic()
        message = {
            **self._take(),
            "clock": now - self._start,
            "step_seconds": (now - self._last_time) / max(step - self._last_step, 1),
        }
        messages = self._group.gather(message, f"the pulse at step {step}")
        self.clock = float(messages[0]["clock"])
        slowest = max(float(each["step_seconds"]) for each in messages)
        self._every = steps_between_pulses(slowest, self._every)
        self._last_step, self._last_time, self._next_step = step, time.monotonic(), step + self._every
        if self._summons is not None:
            self._summons.met(step, self._next_step)
        return _asked(messages)

    def _take(self) -> dict[str, Any]:
        requests = self._requests
        save = requests.save
        if save:  # whoever asks again after this asks for another save
            requests.save = False
        return {"leave": requests.leave, "stop": requests.stop, "save": "SIGUSR1" if save else None}


def _asked(messages: list[dict[str, Any]]) -> Asked:
    def first(name: str) -> str | None:
        asked = [(rank, each[name]) for rank, each in enumerate(messages) if each[name]]
        return f"{asked[0][1]} on {ranks_text([rank for rank, _ in asked])}" if asked else None

    return Asked(first("leave"), first("stop"), first("save"))


def steps_between_pulses(step_seconds: float, before: int) -> int:
    """As many steps as fit into the pulse's time, growing no faster than fourfold from one to the next."""
    return max(1, min(int(PULSE_SECONDS / max(step_seconds, 1e-9)), before * 4, 10_000))
