"""The step under way: the micro-batches at hand, what they weigh, and what they complete."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.data.cursors import Cursor
from lockstep.data.order import MicroBatch
from lockstep.errors import ConfigError

Count = Tensor | float


class Step:
    """From the first micro-batch of a global batch until the one after its last is asked for.

    A loop may take micro-batches of several sources at once, and step several optimizers for each: it is one step.
    One that has no micro-batch at all is that of a loop which brings its own data.
    """

    def __init__(self) -> None:
        self._at_hand: dict[str, tuple[Cursor, MicroBatch]] = {}
        self._micro: MicroBatch | None = None  # the one that was handed out last; in most loops, the only one
        self.counted = False  # whether progress has it: an optimizer has stepped
        self.pending = False  # whether there are gradients that no optimizer has used
        self._counts: list[Count | None] = []  # of the backward passes that no optimizer has claimed yet
        self._claimed: dict[int, list[Count]] = {}  # by optimizer, over the micro-batches so far

    def take(self, cursor: Cursor, micro: MicroBatch) -> None:
        """Another micro-batch of the same step is at hand, in place of the last one of its source."""
        self._at_hand[cursor.name] = (cursor, micro)
        self._micro = micro

    def has_taken(self, cursor: Cursor) -> bool:
        return cursor.name in self._at_hand

    @property
    def cursors(self) -> list[Cursor]:
        return [cursor for cursor, _ in self._at_hand.values()]

    @property
    def is_bare(self) -> bool:
        return not self._at_hand

    @property
    def was_left(self) -> bool:
        """Whether the loops that its micro-batches came from were left before an optimizer stepped."""
        return not self.counted and not self.is_bare and not any(cursor.is_open for cursor in self.cursors)

    @property
    def completes_batch(self) -> bool:
        """Whether the micro-batches at hand are the last of their global batch."""
        if len(self._at_hand) == 1 and self._micro is not None:
            return self._micro.completes_batch
        return all(micro.completes_batch for _, micro in self._at_hand.values())

    @property
    def is_part(self) -> bool:
        """Whether the current micro-batch is one of several of its global batch."""
        return any(micro.number > 0 or not micro.completes_batch for _, micro in self._at_hand.values())

    @property
    def weight(self) -> float:
        """What a mean over the micro-batch at hand is multiplied with."""
        if len(self._at_hand) == 1 and self._micro is not None:
            return self._micro.weight
        weights = {cursor.name: micro.weight for cursor, micro in self._at_hand.values()}
        if len(set(weights.values())) > 1:
            shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
            raise ConfigError(
                f"run.backward: the batches at hand count differently ({shown}), so that a mean over them has no "
                "weight. Give the loss as a sum and a count: run.backward(total, count=n)"
            )
        return next(iter(weights.values()), 1.0)

    @property
    def scale(self) -> float:
        """What a sum over the micro-batch at hand is multiplied with."""
        return 1.0 if self._micro is None else self._micro.scale

    @property
    def examples(self) -> int:
        """How many examples a mean over the micro-batch that was handed out last counts for."""
        return 1 if self._micro is None else self._micro.examples

    def computed(self, count: Count | None) -> None:
        """Gradients of the micro-batch at hand were added up, of a mean or (with a count) of a sum."""
        self.pending = True
        self._counts.append(count)

    def claim(self, optimizer: Any) -> list[Count]:
        """What the gradients of an optimizer are to be divided by: the counts of the backward passes before its step,
        in every micro-batch so far; nothing where they were means."""
        counts, self._counts = self._counts, []
        if not self._claimed and counts == [None]:
            return []  # the usual case: one loss, a mean
        counted = [each for each in counts if each is not None]
        if counted and len(counts) > 1:
            raise ConfigError(
                f"run.step: {len(counts)} backward passes came before it, and {len(counted)} of them gave a sum and a "
                "count: their gradients cannot be told apart any more. Add the losses up before run.backward, or let "
                "each optimizer step right after its own; with accumulate, call run.step for every micro-batch"
            )
        claimed = self._claimed.setdefault(id(optimizer), [])
        claimed += counted
        return claimed

    def count(self) -> list[MicroBatch]:
        """Count the step, and move the cursors on; the last micro-batches of the global batches it trained on."""
        self.counted = True
        for cursor, micro in self._at_hand.values():
            cursor.advance(micro)
        return [micro for _, micro in self._at_hand.values()]
