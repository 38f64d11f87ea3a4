"""Control sync: ranks exchange what they were asked for, periodically or out of band, and use rank 0's clock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import RankMissing
from lockstep.strategy.base import Strategy

# A rank learns of a stop that another one was asked for within about this time (or one step, if that is longer).
SYNC_SECONDS = 0.5


@dataclass(frozen=True)
class Asked:
    """What any of the ranks was asked for; the same on all of them."""

    leave: str | None = None
    stop: str | None = None
    save: str | None = None

    def with_later(self, later: Asked) -> Asked:
        return Asked(self.leave or later.leave, self.stop or later.stop, self.save or later.save)


NOTHING = Asked()


class ControlSync:
    """Synchronizes ranks every so many steps, or out of band where steps have become slow and a rank was asked.

    The number of steps follows from the measured step time, so that the exchange costs a small fixed fraction of the
    time; it is computed from what was exchanged, so all ranks compute the same.
    """

    def __init__(
        self, group: Group, requests: StopRequests, strategy: Strategy, out_of_band: OutOfBandSync | None = None
    ) -> None:
        self._group, self._requests, self._strategy, self._out_of_band = group, requests, strategy, out_of_band
        self._start = self._last_time = time.monotonic()
        self._last_step = 0
        self._next_step = 0
        self._every = 1
        self.exchanged = False  # whether ranks exchanged something at the last beat
        self.clock = 0.0  # seconds of training, the same on all ranks
        self._clock_at_start = 0.0

    def start(self, step: int, clock: float) -> None:
        """Begins at a step and a clock that all ranks know, fresh or restored."""
        now = time.monotonic()
        self._start, self._last_time = now - clock, now
        self.clock = self._clock_at_start = clock
        self._last_step, self._next_step, self._every = step, step + 1, 1
        if self._out_of_band is not None:
            self._out_of_band.met(step, self._next_step)

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def since_start(self) -> float:
        """Seconds since this start of the run, restored or not, the same on all ranks."""
        return self.clock - self._clock_at_start

    def beat(self, step: int) -> Asked:
        """Returns what all ranks are to do at this step, if any of them was asked for something."""
        now = time.monotonic()
        if self._group.world_size == 1:
            self.exchanged = True
            self.clock = now - self._start
            return _asked([self._take()]) if self._requests.any else NOTHING
        self.exchanged = step >= self._next_step or (
            self._out_of_band is not None and self._out_of_band.called_at(step)
        )
        return self.meet(step) if self.exchanged else NOTHING

    def meet(self, step: int) -> Asked:
        """Exchanges requests now, on all ranks."""
        now = time.monotonic()
        message = {
            **self._take(),
            "clock": now - self._start,
            "used": self._strategy.used,
            "step_seconds": (now - self._last_time) / max(step - self._last_step, 1),
        }
        messages = self._group.gather(message, f"the control sync at step {step}")
        self._strategy.compare_used([each["used"] for each in messages])
        self.clock = float(messages[0]["clock"])
        slowest = max(float(each["step_seconds"]) for each in messages)
        self._every = steps_between_syncs(slowest, self._every)
        self._last_step, self._last_time, self._next_step = step, time.monotonic(), step + self._every
        if self._out_of_band is not None:
            self._out_of_band.met(step, self._next_step)
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


def steps_between_syncs(step_seconds: float, before: int) -> int:
    """Returns as many steps as fit into SYNC_SECONDS, growing no faster than fourfold from one sync to the next."""
    return max(1, min(int(SYNC_SECONDS / max(step_seconds, 1e-9)), before * 4, 10_000))


# Where the last sync is younger than this, the next planned one is near enough.
_QUIET_SECONDS = 1.5
# Without any request: how old the common clock may become, by which runs save every so many minutes.
_OLD_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class OutOfBandSync:
    """Calls a sync through the store. `called_at` and `met` are for the training thread, `look` for the heartbeat's."""

    def __init__(self, group: Group, requests: StopRequests) -> None:
        self._group, self._requests = group, requests
        self._lock = threading.Lock()
        self._round = 0  # syncs so far, the same on all ranks
        self._passed = -1  # the last safe point without a sync, or of the last sync
        self._held = False  # in this round, no safe point is passed without looking
        self._planned = 0
        self._met_at = time.monotonic()
        self._answered = -1  # the round that this rank has answered in

    def called_at(self, step: int) -> bool:
        """Returns whether all ranks meet at the safe point of this step; else it is passed."""
        with self._lock:
            if not self._held:
                self._passed = step
                return False
        if step >= self._meeting():
            return True
        with self._lock:
            self._passed = step
        return False

    def met(self, step: int, planned: int) -> None:
        """Notes that a sync is over, and at which step the next is planned."""
        with self._lock:
            self._round += 1
            self._held = False
            self._passed, self._planned = step, planned
            self._met_at = time.monotonic()

    def look(self, store: Any) -> None:
        """Calls the others where this rank was asked for something, and answers a call."""
        number = self._round
        if self._answered < number and (self._wants() or store.check([_key(number)])):
            if not store.check([_key(number)]):
                store.set(_key(number), b"called")
            with self._lock:
                if self._round != number:
                    return  # they met in the meantime
                self._held = True
                passed = self._passed
            store.set(_key(number, self._group.rank), str(passed))
            self._answered = number
        if self._group.rank == 0 and self._answered == number:
            self._answer_where(store, number)

    def _wants(self) -> bool:
        quiet = time.monotonic() - self._met_at
        if self._planned <= self._passed + 1 or quiet < _QUIET_SECONDS:
            return False  # the next safe point has a sync anyway, or it is not far
        return self._requests.any or (self._group.rank == 0 and quiet > _OLD_SECONDS)

    def _answer_where(self, store: Any, number: int) -> None:
        if store.check([_key(number, "at")]):
            return
        answers = store.read_all([_key(number, rank) for rank in range(self._group.world_size)])
        if None not in answers:
            store.set(_key(number, "at"), str(max(map(int, answers)) + 1))

    def _meeting(self) -> int:
        """Returns the step whose safe point all ranks meet at, once it is known."""
        key, began = _key(self._round, "at"), time.monotonic()
        with self._group.activity.within("'a control sync out of band'", waits=True):
            while (step := self._group.published([key])[0]) is None:
                if time.monotonic() - began > self._group.timeout:
                    raise RankMissing(
                        f"waited {self._group.timeout:g} s for a control sync out of band: the heartbeat of a "
                        "rank does not answer. Look at the logs of the other ranks; timeouts.collective sets the limit"
                    )
                time.sleep(_LOOK_SECONDS)
        return int(step)


def _key(number: int, what: int | str | None = None) -> str:
    return f"sync/{number}" if what is None else f"sync/{number}/{what}"
