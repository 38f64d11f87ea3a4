"""The current step: its micro-batches, what they weigh, and what they complete."""

from __future__ import annotations

from lockstep.data.batches import MicroBatch
from lockstep.data.cursors import Cursor
from lockstep.errors import ConfigError


class Step:
    """From the first micro-batch of a global batch until the one after its last is asked for. A loop may take
    micro-batches of several sources at once, and step several optimizers for each: it is one step. A step without any
    micro-batch is an iteration of run.steps."""

    def __init__(self, dp_size: int = 1, outer: Cursor | None = None) -> None:
        """In a loop within a loop, the batch of the `outer` source is current as well, and was counted before."""
        self._dp_size = dp_size
        self._current: dict[str, tuple[Cursor, MicroBatch]] = {}  # the last micro-batch of each source
        self._is_inner = outer is not None
        if outer is not None and outer.micro is not None:
            self._current[outer.name] = (outer, outer.micro)
        self._micro: MicroBatch | None = None  # the one that was handed out last
        self._only: MicroBatch | None = None  # the same, where there is one source, as in most loops
        self.counted = False  # whether progress has it: an optimizer has stepped
        self.pending = False  # whether there are gradients that no optimizer has used
        self.partly_ended = False  # whether a source of it has ended, and another has not
        self.taken = self.trained = 0  # micro-batches so far, and when a backward pass was made last
        self.whole = self.tokens = 0  # of the global batches it was trained on, over all ranks

    def take(self, cursor: Cursor, micro: MicroBatch) -> None:
        """Adds a micro-batch, in place of the last one of its source."""
        before = self._current.get(cursor.name)
        if before is None or before[1].completes_batch:  # a loop may accumulate over batches
            self.whole += micro.whole
            self.tokens += micro.tokens
        self._current[cursor.name] = (cursor, micro)
        self._micro, self._only = micro, micro if len(self._current) == 1 else None
        self.taken += 1

    @property
    def batches(self) -> tuple[tuple[str, int, int], ...]:
        """Its global batches, by source, epoch and number."""
        return tuple((name, cursor.epoch, micro.batch) for name, (cursor, micro) in self._current.items())

    def has_taken(self, cursor: Cursor) -> bool:
        return cursor.name in self._current

    @property
    def micro_batches(self) -> list[tuple[Cursor, MicroBatch]]:
        """Its sources, and the last micro-batch of each."""
        return list(self._current.values())

    @property
    def is_bare(self) -> bool:
        return not self._current

    def computed(self) -> None:
        """Notes a backward pass over the current micro-batches."""
        self.pending, self.trained = True, self.taken

    @property
    def was_left(self) -> bool:
        """Whether the loops over its sources were left before an optimizer stepped."""
        return not self.counted and not self.is_bare and not self.has_open_source

    @property
    def has_open_source(self) -> bool:
        return any(cursor.is_open for cursor, _ in self.micro_batches)

    @property
    def completes_batch(self) -> bool:
        """Whether the current micro-batches are the last of their global batches."""
        if self._only is not None:
            return self._only.completes_batch
        return all(micro.completes_batch for _, micro in self._current.values())

    @property
    def is_part(self) -> bool:
        """Whether the current micro-batch is one of several of its global batch."""
        return any(micro.number > 0 or not micro.completes_batch for _, micro in self._current.values())

    @property
    def weight(self) -> float:
        """The factor for a mean over the current micro-batch."""
        return self._common("weight", self._dp_size)

    @property
    def scale(self) -> float:
        """The factor for a sum over the current micro-batch."""
        return self._common("scale", 1)

    def _common(self, name: str, multiple: int) -> float:
        """Returns the factor that all current micro-batches have, or refuses the loss on all ranks alike."""
        if self._only is not None:
            return float(getattr(self._only, name))
        micros = [micro for _, micro in self._current.values()]
        factors = {cursor.name: float(getattr(micro, name)) for cursor, micro in self._current.values()}
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
        """How many examples a mean over the last micro-batch counts for."""
        return 1 if self._micro is None else self._micro.examples

    def count(self) -> int:
        """Moves the cursors on. Returns how many batches of their passes are done then, of the one that is farthest."""
        self.counted = True
        for cursor, micro in self._current.values():
            cursor.advance(micro)
        return max((micro.batch + 1 for _, micro in self._current.values()), default=0)

    @property
    def completes_epoch(self) -> bool:
        """Whether it trained on the last batch of a source; in a loop within a loop, of both."""
        last = [micro.completes_epoch for _, micro in self._current.values()]
        return all(last) if self._is_inner else any(last)
