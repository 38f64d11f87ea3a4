"""The step under way: the micro-batches at hand, what they weigh, and what they complete."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.data.batches import MicroBatch
from lockstep.data.cursors import Cursor
from lockstep.errors import ConfigError


class Step:
    """From the first micro-batch of a global batch until the one after its last is asked for.

    A loop may take micro-batches of several sources at once, and step several optimizers for each: it is one step.
    One that has no micro-batch at all is that of a loop which brings its own data.
    """

    def __init__(self, dp_size: int = 1) -> None:
        """`shares` is into how many parts every global batch is divided."""
        self._dp_size = dp_size
        self._at_hand: dict[str, tuple[Cursor, MicroBatch]] = {}
        self._micro: MicroBatch | None = None  # the one that was handed out last; in most loops, the only one
        self.counted = False  # whether progress has it: an optimizer has stepped
        self.pending = False  # whether there are gradients that no optimizer has used
        self.partly_ended = False  # whether a source of it has ended, and another has not
        self.taken = self.trained = 0  # micro-batches so far, and when a backward pass was made last
        self._examples_before = 0  # of whole batches that others have taken the place of

    def take(self, cursor: Cursor, micro: MicroBatch) -> None:
        """Another micro-batch of the same step is at hand, in place of the last one of its source."""
        before = self._at_hand.get(cursor.name)
        if before is not None and before[1].completes_batch:  # the loop accumulates over batches
            self._examples_before += before[1].whole
        self._at_hand[cursor.name] = (cursor, micro)
        self._micro = micro
        self.taken += 1

    @property
    def batches(self) -> tuple[tuple[str, int, int], ...]:
        """The global batches that it is about now."""
        return tuple((name, cursor.epoch, micro.batch) for name, (cursor, micro) in self._at_hand.items())

    def has_taken(self, cursor: Cursor) -> bool:
        return cursor.name in self._at_hand

    @property
    def at_hand(self) -> list[tuple[Cursor, MicroBatch]]:
        """The sources that it is about, and the last micro-batch of each."""
        return list(self._at_hand.values())

    @property
    def is_bare(self) -> bool:
        return not self._at_hand

    def computed(self) -> None:
        """A backward pass was made of the current micro-batches."""
        self.pending, self.trained = True, self.taken

    @property
    def was_left(self) -> bool:
        """Whether the loops that its micro-batches came from were left before an optimizer stepped."""
        return not self.counted and not self.is_bare and not any(cursor.is_open for cursor, _ in self.at_hand)

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
        return self._common({cursor.name: micro.weight for cursor, micro in self._at_hand.values()}, self._dp_size)

    @property
    def scale(self) -> float:
        """What a sum over the micro-batch at hand is multiplied with."""
        return self._common({cursor.name: micro.scale for cursor, micro in self._at_hand.values()}, 1)

    def _common(self, factors: Mapping[str, float], multiple: int) -> float:
        """The factor that the current micro-batches have in common. It is refused on all ranks where one has none."""
        micros = [micro for _, micro in self._at_hand.values()]
        if len(micros) == 1:
            return next(iter(factors.values()))
        uneven = any(each.whole < self._dp_size or each.whole % multiple for each in micros)
        if len(set(factors.values())) > 1 or (uneven and len({each.whole for each in micros}) > 1):
            shown = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
            raise ConfigError(
                f"run.backward: the batches of this step count differently ({shown}), so that a loss over all of them "
                "has no weight. Take batches of equal sizes, each divided by the number of ranks, or call run.backward "
                "in a loop over one source at a time"
            )
        return next(iter(factors.values()), 1.0)

    @property
    def examples(self) -> int:
        """How many examples a mean over the micro-batch that was handed out last counts for."""
        return 1 if self._micro is None else self._micro.examples

    def count(self) -> list[MicroBatch]:
        """Count the step, and move the cursors on; the last micro-batches of the global batches it trained on."""
        self.counted = True
        for cursor, micro in self._at_hand.values():
            cursor.advance(micro)
        return [micro for _, micro in self._at_hand.values()]

    @property
    def whole(self) -> int:
        """How many examples it was trained on, over all ranks."""
        return self._examples_before + sum(micro.whole for _, micro in self._at_hand.values())
