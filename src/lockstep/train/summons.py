"""Calls all ranks to a pulse out of turn, by way of their heartbeats.

A pulse is planned in steps, from how long steps took. Where they become slow after that, the next one may be an hour
away, and nobody would hear of a request to stop. So the thread that sends the heartbeat looks for it: whoever was asked
for something leaves word in the store; every rank that reads it says which safe point it has passed last, and from then
on does not pass another one without looking; rank 0 says at which one they meet, which is the next that nobody has
passed. No clock is compared with another, and no rank waits for one that it holds up itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.distributed.group import Group
from lockstep.errors import RankMissing

# Where the last pulse is younger than this, the next planned one is near enough.
_QUIET_SECONDS = 1.5
# Without any request: how old the clock that all ranks share may become, by which runs save every so many minutes.
_OLD_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class Summons:
    """One rank's part. `called_at` and `met` are for the training thread, `look` is for that of the heartbeat."""

    def __init__(self, group: Group, asked: Callable[[], bool]) -> None:
        self._group, self._asked = group, asked
        self._lock = threading.Lock()
        self._round = 0  # pulses so far, the same on all ranks
        self._passed = -1  # the last safe point without a pulse, or of the last pulse
        self._held = False  # in this round, no safe point is passed without looking
        self._planned = 0
        self._met_at = time.monotonic()
        self._said = -1  # the round that this rank has answered in

    def called_at(self, step: int) -> bool:
        """Whether all ranks meet at the safe point of this step; else it is passed."""
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
        """A pulse is over; the next is planned at another step."""
        with self._lock:
            self._round += 1
            self._held = False
            self._passed, self._planned = step, planned
            self._met_at = time.monotonic()

    def look(self, store: Any) -> None:
        """Call the others, where this rank was asked for something; and answer whoever has called."""
        number = self._round
        if self._said < number and (self._wants() or store.check([_key(number)])):
            if not store.check([_key(number)]):
                store.set(_key(number), b"called")
            with self._lock:
                if self._round != number:
                    return  # they met in the meantime
                self._held = True
                passed = self._passed
            store.set(_key(number, self._group.rank), str(passed))
            self._said = number
        if self._group.rank == 0 and self._said == number:
            self._say_where(store, number)

    def _wants(self) -> bool:
        quiet = time.monotonic() - self._met_at
        if self._planned <= self._passed + 1 or quiet < _QUIET_SECONDS:
            return False  # the next safe point is a pulse anyway, or it is not far
        return self._asked() or (self._group.rank == 0 and quiet > _OLD_SECONDS)

    def _say_where(self, store: Any, number: int) -> None:
        if store.check([_key(number, "at")]):
            return
        answers = store.read_all([_key(number, rank) for rank in range(self._group.world_size)])
        if None not in answers:
            store.set(_key(number, "at"), str(max(map(int, answers)) + 1))

    def _meeting(self) -> int:
        """The step whose safe point all ranks meet at, once it is known."""
        key, began = _key(self._round, "at"), time.monotonic()
        with self._group.activity.within("'a pulse out of turn'", waits=True):
            while (step := self._group.word(key)) is None:
                if time.monotonic() - began > self._group.timeout:
                    raise RankMissing(
                        f"waited {self._group.timeout:g} s for a pulse out of turn: the heartbeat of a rank does not "
                        "answer. Look at the logs of the other ranks; launch.timeout sets the limit"
                    )
                time.sleep(_LOOK_SECONDS)
        return int(step)


def _key(number: int, what: int | str | None = None) -> str:
    return f"summons/{number}" if what is None else f"summons/{number}/{what}"
