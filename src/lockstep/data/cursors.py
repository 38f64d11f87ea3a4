"""Where training is in its data: a cursor for every source, saved with what its position depends on.

A source is one dataset as the training loop walks it. It counts its own epochs: a loop that takes the next hundred
batches of a source in every epoch of the run walks on where it was, and two sources in one epoch do not disturb each
other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.order import MicroBatch
from lockstep.data.orders import Sequential, ShuffledBefore
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]


@dataclass
class Cursor:
    """The position in one source. It moves on when the step of a batch is done, not when the batch is handed out."""

    name: str
    facts: dict[str, Any] | None = None  # what the position depends on; None where an old checkpoint does not say
    epoch: int = 0  # passes over the source: what its order is a function of
    batch: int = 0  # global batches done in this pass
    # Whether all of them are done. What follows the pass in the user's loop may not be: so the cursor stays at the end
    # until the loop has been left, and a run that is resumed there finds the pass empty.
    ended: bool = False
    passes: int = 0  # how often the loop over it was left in this epoch of the run
    # Of a stream in the midst of a pass, where all shares of it were when the run was saved; None of any other source.
    stream: dict[str, Any] | None = None
    place: Callable[[], Any] | None = field(default=None, repr=False)  # where this rank's share of it is now
    kind: str = ""  # of stream that it is, which says what its places mean
    dataset: Any = field(default=None, repr=False)
    is_open: bool = False
    opened: int = 0  # when it was opened last, in the order of all openings
    to_skip: int = 0  # passes of the epoch under way that were done before the run was restored
    before_facts: bool = False  # whether it was restored from a checkpoint that does not say

    def advance(self, micro: MicroBatch) -> None:
        self.batch, self.ended = micro.batch + 1, micro.completes_epoch
        self.place = None if self.ended else micro.place

    def leave(self, finished: bool) -> None:
        """The loop over the source was left, at its end or before."""
        self.is_open = False
        self.passes += 1
        if finished or self.ended:
            self.epoch, self.batch, self.ended = self.epoch + 1, 0, False
            self.stream = self.place = None

    @property
    def was_shuffled_before(self) -> bool:
        """Whether it was first walked before 0.6, in the random order of that time: it keeps that to the end."""
        return self.before_facts or (self.facts or {}).get("order") == ShuffledBefore.name

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("name", "facts", "epoch", "batch", "ended", "passes")}
        return state if self.stream is None else {**state, "stream": self.stream}


class Cursors:
    """The cursors of a run, in the order in which their sources were first walked."""

    def __init__(self) -> None:
        self._cursors: list[Cursor] = []
        self._openings = 0

    @property
    def between_passes(self) -> bool:
        """Whether a pass of this epoch was left and none is under way: here is what follows the inner loop."""
        return any(each.passes for each in self._cursors) and not any(each.is_open for each in self._cursors)

    def open(self, dataset: Any, facts: Facts, name: str | None = None) -> Cursor | None:
        """The cursor of a source that is about to be walked; None where this pass was done before a restore."""
        cursor = self.find(dataset, facts.get("count"), name)
        if cursor.is_open:
            raise ConfigError(
                f"run.batches: {cursor.name} is being walked already: its position would be counted twice. Leave the "
                "first loop over it before, or give the second one a name of its own: run.batches(..., name='second')"
            )
        cursor.dataset = dataset
        if cursor.to_skip:
            cursor.to_skip -= 1
            return None
        self._check(cursor, facts)
        self._openings += 1
        cursor.facts, cursor.is_open, cursor.opened = dict(facts), True, self._openings
        return cursor

    @property
    def moved_on(self) -> list[Cursor]:
        """Those of streams of which a batch is done since they were opened or saved."""
        return [each for each in self._cursors if each.place is not None]

    def begin_epoch(self) -> None:
        for cursor in self._cursors:
            cursor.passes = cursor.to_skip = 0

    def state_dict(self, epoch_is_done: bool = False) -> list[dict[str, Any]]:
        states = [cursor.state_dict() for cursor in self._cursors]
        return [{**each, "passes": 0} for each in states] if epoch_is_done else states

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        self._cursors = [_restored(state) for state in states]

    def find(self, dataset: Any, count: int | None, name: str | None) -> Cursor:
        """The cursor of a source, whether it is walked or not."""
        cursor = self._find(dataset, count, name)
        if not cursor.is_open:
            cursor.dataset = dataset
        return cursor

    def _find(self, dataset: Any, count: int | None, name: str | None) -> Cursor:
        if name is not None:
            known = [each for each in self._cursors if each.name == name]
            return known[0] if known else self._new(name)
        for cursor in self._cursors:
            if cursor.dataset is dataset:
                return cursor
        # A restored source has no dataset yet: sources come back in the order in which they were first walked.
        for cursor in self._cursors:
            if cursor.dataset is None:
                return cursor
        # A loop may make its dataset anew for every pass. What is as long, of the same kind and not being walked is
        # the same source; of several, the one that was walked longest ago.
        alike = [
            each
            for each in self._cursors
            if not each.is_open and type(each.dataset) is type(dataset) and (each.facts or {}).get("count") == count
        ]
        return min(alike, key=lambda each: each.opened) if alike else self._new(f"source {len(self._cursors) + 1}")

    def _new(self, name: str) -> Cursor:
        self._cursors.append(Cursor(name))
        return self._cursors[-1]

    def _check(self, cursor: Cursor, facts: Facts) -> None:
        """Refuse to go on in the midst of a pass with anything that its position depends on being different."""
        before = cursor.facts or {}
        in_the_midst = bool(cursor.batch and not cursor.ended)
        # Which examples there are in which place may be new in every pass: in the midst of one, it may not.
        changed = [f"{name} {before[name]!r} -> {value!r}" for name, value in facts.items()
                   if name in before and before[name] != value and (in_the_midst or name != "examples")]  # fmt: skip
        if not changed:
            return
        if in_the_midst:
            raise ConfigError(
                f"run.batches: {cursor.batch} batches of this pass over {cursor.name} are done, and it cannot be gone "
                f"on with {', '.join(changed)}: examples would be trained on twice, or never. Take the change back "
                "until the pass is done, or go on from a checkpoint at the end of an epoch: run.restore(step=...)"
            )
        told = f"{cursor.name} is walked differently from here on: {', '.join(changed)}"
        if before.get("count", facts.get("count")) == facts.get("count") or cursor.opened:
            logger.info(told)
        else:  # since the run was resumed
            logger.warning(
                "%s. Where it is a random part of other data, of which another part is for validation, examples may "
                "have moved between the two", told,
            )  # fmt: skip


def _restored(state: dict[str, Any]) -> Cursor:
    facts = None if state["facts"] is None else dict(state["facts"])
    if facts and "shuffle" in facts:  # of a version that had two orders
        facts["order"] = ShuffledBefore.name if facts.pop("shuffle") else Sequential.name
    return Cursor(**{**state, "facts": facts}, to_skip=state["passes"], before_facts=facts is None)
