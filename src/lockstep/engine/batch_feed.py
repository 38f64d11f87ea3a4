"""Hands out batches and owns how far training has come: the progress, a cursor per source, the current step.

The engine drives it: `plan` or `plan_stream`, `open`, then `next` for every micro-batch, and `leave`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.config.load import uneven_shares
from lockstep.config.schema import RunSettings
from lockstep.data.batches import MicroBatch, Position, Ramps
from lockstep.data.cursors import Cursor, Cursors, Progress
from lockstep.data.loader import Loaders, check_dataset, one_ahead
from lockstep.data.order import choose
from lockstep.data.source import Source, whole_number
from lockstep.data.stream import Streams
from lockstep.data.stream_batches import streamed
from lockstep.data.stream_reader import check_stream, is_stateful, is_stream
from lockstep.distributed.group import Group
from lockstep.engine import loop_checks
from lockstep.engine.compile_guard import CompileGuard
from lockstep.engine.exchange import gather_places, require_plain
from lockstep.engine.gradients import GradientTracker
from lockstep.engine.step import Step
from lockstep.errors import ConfigError
from lockstep.profiler import Profiler
from lockstep.runtime.base import Runtime
from lockstep.strategy import compiled
from lockstep.strategy.base import Strategy

logger = logging.getLogger(__name__)

MicroBatches = Generator[tuple[MicroBatch, Any], None, None]


@dataclass(frozen=True)
class PlannedPass:
    """A pass over a source, checked and not yet begun."""

    data: Any
    facts: dict[str, Any]  # what its position depends on
    name: str | None
    site: str | None
    accumulate: int
    begin: Callable[[Cursor], MicroBatches | None]  # None where the pass had ended before a restore


@dataclass
class OpenPass:
    """A pass over a source that the loop is in."""

    cursor: Cursor
    micros: MicroBatches
    accumulate: int
    finished: bool = False


class BatchFeed:
    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        settings: RunSettings,
        profiler: Profiler,
        guard: CompileGuard,
        gradients: GradientTracker,
    ) -> None:
        self._group, self._activity, self._strategy = group, group.activity, strategy
        self._profiler, self._guard, self._gradients = profiler, guard, gradients
        self._runtime, self.seed = runtime, settings.seed
        self._dp_rank, self._shuffle_buffer = strategy.dp_rank, settings.data.shuffle_buffer
        self.loaders = Loaders(
            self._dp_rank, strategy.dp_size, settings.seed, settings.data, runtime, strategy.batch_multiple,
            strategy.leaves,
        )  # fmt: skip
        self.streams = Streams(
            self._dp_rank, strategy.dp_size, settings.seed, self.loaders.loading, runtime.fixed_shapes,
            strategy.batch_multiple,
        )  # fmt: skip
        self.progress = Progress()
        self.cursors = Cursors()
        self.ramps = Ramps()  # of what is trained on
        self.step: Step | None = None  # the current one, or the last until the next begins
        self.busy_since = 0.0
        self.was_asked = False  # for an epoch, a batch or a step
        self._in_epochs = self._in_steps = False
        self._saved_by_loop = False  # since the last batch of an outer loop
        self._uneven: set[int] = set()  # batch sizes that the log has named: the ranks do not divide them
        self._saved_as_done: int | None = None  # the epoch that was saved as one with nothing left to do

    # Epochs and the position in the data

    def enter_epochs(self) -> None:
        self._in_epochs = self.was_asked = True

    def next_epoch(self) -> None:
        self.progress.next_epoch()
        self.cursors.begin_epoch()
        self._strategy.reshard()  # a loop may freeze parameters now, or others

    def leave_epochs(self) -> None:
        if self.progress.epoch_ended:
            self.progress.next_epoch()
        self._in_epochs = False
        self.cursors.begin_epoch()  # a loop that comes back to an epoch it has left continues there

    def position(self, explicit: bool) -> dict[str, Any]:
        """Returns the state of progress and cursors to save.

        A save that the loop asks for after its inner loop counts as the end of the epoch. An automatic one does not:
        what follows the last batch is still to be done.
        """
        self._saved_by_loop = explicit
        done = explicit and self._in_epochs and self.cursors.between_passes
        if done:
            self._saved_as_done = self.progress.epoch
        self._exchange_places()
        return {
            "progress": self.progress.state_dict(epoch_is_done=done),
            "cursors": self.cursors.state_dict(epoch_is_done=done),
        }

    def load_position(self, state: dict[str, Any]) -> None:
        self.progress.load_state_dict(state["progress"])
        self.cursors.load_state_dict(state["cursors"])

    def count_step(self) -> bool:
        """Counts the current step once, however many optimizers step for it. Returns whether this call did."""
        step, progress = self.step, self.progress
        if step is None or step.counted:
            return False
        progress.batch = step.count()
        progress.step += 1
        progress.examples += step.whole
        progress.tokens += step.tokens
        progress.epoch_ended = step.completes_epoch
        return True

    @property
    def step_number(self) -> int:
        """The number of the current step, before and after an optimizer has stepped."""
        return self.progress.step + (0 if self.step is None or self.step.counted else 1)

    def current_step(self) -> Step:
        """Returns the current step; a new one where an optimizer steps after the end of the data."""
        if self.step is None or (self.step.counted and self.step.is_bare and not self._in_steps):
            self.step = Step(self._strategy.leaves or self._strategy.dp_size)
        return self.step

    def required_step(self, what: str) -> Step:
        """Returns the current step; refuses a loop without one, which could be neither stopped nor saved."""
        if self.step is None or (self.step.is_bare and not self._in_steps):
            raise loop_checks.outside_of_a_step(what)
        return self.step

    def enter_steps(self) -> None:
        loop_checks.refuse_steps_among_batches(self._in_steps or self.cursors.any_open)
        self._in_steps = self.was_asked = True

    def begin_own_step(self) -> int:
        """Begins a step without batches. Returns how many there were before it."""
        self.current_step()
        return self.progress.step

    def leave_steps(self) -> None:
        self._in_steps, self.step = False, None

    # Planning a pass

    def plan(self, given: Source, name: str | None, *, accumulate: int, site: str | None = None) -> PlannedPass:
        """Checks a pass over a dataset or a stream of examples."""
        dataset, batch_size, drop_last = given.dataset, given.batch_size, given.drop_last
        accumulate = whole_number(accumulate, "run.batches: accumulate", 1) * self._strategy.micro_batches
        self._release_for(dataset)
        if is_stream(dataset):
            if given.order is not None:
                raise ConfigError(
                    f"run.batches: order is for data that has an index, and {type(dataset).__name__} is a stream, "
                    "which comes in the order that it has: leave it out"
                )
            return self._plan_examples(given, name, accumulate, site)
        self._log_uneven_shares(batch_size)
        check_dataset(dataset, "the dataset")
        chosen = choose(given.order, given.shuffle, dataset, batch_size, self.seed)
        source = self.cursors.find(dataset, chosen.count, name, site)
        how: dict[str, Any] = {"given": chosen, "drop_last": drop_last, "ramps": self.ramps}
        plan = self.loaders.plan(dataset, batch_size, accumulate=accumulate, **how)
        if plan.batches == 0:
            raise ConfigError(
                f"the training data has {chosen.length} examples, fewer than one batch of {batch_size}, and "
                "drop_last leaves out what does not fill a batch: lower batch_size or set drop_last to false"
            )
        facts = {
            "count": plan.count,
            "batch_size": batch_size,
            "drop_last": drop_last,
            "seed": self.seed,
            **chosen.facts(source.epoch),
            **self.ramps.facts(),
        }
        compares = not source.opened or chosen.drawn_anew

        def begin(cursor: Cursor) -> MicroBatches:
            if compares:
                loop_checks.compare_order(self._group, cursor.name, facts)
            loader = self.loaders.for_training(cursor.name, dataset, plan, given.collate, given.loading)
            at = Position(begin=chosen.length) if cursor.ended else cursor.position
            micros: Any = loader.epoch(cursor.epoch, at)
            ahead = self._runtime.copies_ahead and loader.fetches_ahead
            return one_ahead(micros, self._runtime.begin_move) if ahead else micros  # type: ignore[return-value]

        return PlannedPass(dataset, facts, name, site, accumulate, begin)

    def _plan_examples(self, given: Source, name: str | None, accumulate: int, site: str | None) -> PlannedPass:
        data, batch_size, shuffle = given.dataset, given.batch_size, given.shuffle
        loop_checks.refuse_stream(data, self._strategy.leaves)
        check_stream(data, "run.batches")
        source = self.streams.source(data)
        facts = {
            "count": source.pieces,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "shuffle_buffer": self._shuffle_buffer,
            "drop_last": given.drop_last,
            "seed": self.seed,
        }

        def begin(cursor: Cursor) -> MicroBatches | None:
            if self._had_ended(cursor):
                return None
            self._exchange_places()  # of a pass that was left in the middle and continues
            walk = self.streams.training(
                data, batch_size, given.collate, accumulate, given.drop_last, epoch=cursor.epoch, start=cursor.batch,
                shuffle=shuffle, buffer=self._shuffle_buffer, saved=cursor.stream, name=cursor.name,
            )  # fmt: skip
            cursor.kind = walk.kind
            return _with_plain_places(walk.in_step(self._group), source.name, self.ramps.tokens)

        return PlannedPass(data, facts, name, site, accumulate, begin)

    def plan_stream(
        self, batches: Iterable[Any], count: Callable[[Any], int], name: str | None, site: str, ahead: bool
    ) -> PlannedPass:
        """Plans a pass over batches that are made elsewhere, of which every dp rank has different ones."""
        loop_checks.refuse_stream(batches, self._strategy.leaves)
        self._release_for(batches)
        return PlannedPass(batches, {}, name, site, 1, partial(self._begin_stream, batches, count, ahead))

    def _begin_stream(
        self, batches: Any, count: Callable[[Any], int], ahead: bool, cursor: Cursor
    ) -> MicroBatches | None:
        if self._had_ended(cursor):
            return None
        self._exchange_places()
        stateful = is_stateful(batches)
        if stateful and cursor.stream is not None:
            self._load_place(cursor, batches)
        elif cursor.batch:
            logger.warning(
                "epoch %d was interrupted after %d batches; %r cannot be entered in the middle, so that these are "
                "trained on again", self.progress.epoch, cursor.batch, cursor.name,
            )  # fmt: skip
            cursor.batch, cursor.stream = 0, None
        cursor.kind = "batches"
        micros = streamed(
            self._group, batches, count, cursor.name, self._dp_rank, self._strategy.dp_size, cursor.batch,
            [self.seed, cursor.epoch] if stateful or ahead else None,
        )  # fmt: skip
        return _with_plain_places(micros, cursor.name)

    def _had_ended(self, cursor: Cursor) -> bool:
        ended = cursor.ended
        if ended:
            self.cursors.leave(cursor, finished=True)
        return ended

    def _load_place(self, cursor: Cursor, batches: Any) -> None:
        assert cursor.stream is not None
        saved = cursor.stream["places"]
        if len(saved) != self._strategy.dp_size:
            raise ConfigError(
                f"run.stream: {cursor.batch} batches of this pass over {cursor.name!r} were done by {len(saved)} "
                f"ranks, each of which had a part of it, and now there are {self._strategy.dp_size}: resume with "
                f"{len(saved)}, or from a checkpoint at the end of an epoch"
            )
        batches.load_state_dict(saved[self._dp_rank])

    def _exchange_places(self) -> None:
        """Makes the positions of all dp ranks in the streams known to every rank, as they are saved."""
        moved = self.cursors.moved_on
        if not moved:
            return
        mine = [each.place() for each in moved if each.place is not None]
        found = gather_places(self._group, self._dp_rank, self._strategy.dp_size, mine, [each.name for each in moved])
        for cursor, of_ranks in zip(moved, found, strict=True):
            cursor.stream, cursor.place = {"kind": cursor.kind, "places": of_ranks}, None

    def _release_for(self, data: Any) -> None:
        """Drops the loaders' references to datasets: a new dataset may continue the position of one that is gone."""
        if not self.cursors.knows(data):
            self.loaders.release(self.cursors.closed)
            self.streams.release()

    def _log_uneven_shares(self, batch_size: int) -> None:
        uneven = None if self._strategy.leaves else uneven_shares(batch_size, self._strategy.dp_size, "batch_size")
        if uneven and batch_size not in self._uneven:
            self._uneven.add(batch_size)
            logger.info(uneven)

    # Walking it

    def open(self, planned: PlannedPass) -> OpenPass | None:
        """Begins a pass; None where it was done before a restore."""
        loop_checks.refuse_steps_among_batches(self._in_steps)
        self.was_asked = True
        self._drop_abandoned_step()
        cursor = self.cursors.open(planned.data, planned.facts, planned.name, planned.site)
        if cursor is None:
            return None
        if self._in_epochs and self._saved_as_done == self.progress.epoch:
            self._saved_as_done = None
            logger.warning(
                "run.checkpoint was called in epoch %d before the pass over %s: a run that is resumed from there takes "
                "the epoch for done, and leaves this pass out. Call run.checkpoint after the last pass of an epoch",
                self.progress.epoch, cursor.name,
            )  # fmt: skip
        micros = planned.begin(cursor)
        if micros is None:
            return None
        self.progress.batch = cursor.batch
        return OpenPass(cursor, micros, planned.accumulate)

    def continues_step(self, walk: OpenPass) -> bool:
        """Returns whether the next micro-batch belongs to the current step."""
        step = self.step
        if step is None or step.counted:
            return False
        # Another source is current; or this one, with the batch not complete, or with gradients that wait for a step.
        return not step.has_taken(walk.cursor) or not step.completes_batch or step.pending

    def is_inner(self, walk: OpenPass) -> bool:
        """Returns whether a step begins within a batch of another source, in a loop within the loop over that."""
        leader = self.cursors.leader_of(walk.cursor)
        if leader is not None and self._saved_by_loop:
            raise loop_checks.saved_in_inner_loop(leader.name, walk.cursor.name)
        return leader is not None

    def next(self, walk: OpenPass) -> Any:
        """Returns the next micro-batch on the device; at the end of the pass, sets `walk.finished`."""
        self._activity.enter("data", self.progress.step + 1)
        self._profiler.enter("data")
        self.busy_since = time.perf_counter()
        following = next(walk.micros, None)
        if following is None:
            walk.finished = True
            return None
        micro, batch = following
        leader = self.cursors.take(walk.cursor, micro)
        if leader is None:
            self._saved_by_loop = False
        again = self.step is not None and self.step.has_taken(walk.cursor)
        self.step = self.step or Step(self._strategy.leaves or self._strategy.dp_size, leader)
        self.step.take(walk.cursor, micro)
        self._gradients.step = self.step
        self._strategy.sync_gradients(self.step.completes_batch)
        if self._strategy.leaves:
            self._strategy.begin_micro_batch(self.step_number, walk.cursor.name, micro, self.step.taken == 1)
            self._gradients.keep()
        batch = self._strategy.move(batch, micro.number)
        filled = again and walk.accumulate == 1 and self._runtime.fixed_shapes
        self._guard.begin("a batch that was filled up" if filled else "a step", batch)
        if not again:  # gradients of a batch's parts are added up: they must not be written over before
            compiled.next_pass()
        self._activity.enter("loss")
        self._profiler.enter("forward")
        return batch

    def leave(self, walk: OpenPass) -> None:
        """Ends a pass, finished or not."""
        with contextlib.closing(walk.micros):
            if walk.cursor.is_open:
                self.cursors.leave(walk.cursor, walk.finished)
            self._strategy.sync_gradients(True)
            step = self.step
            if step is not None and not step.counted and step.pending:
                if walk.finished:
                    self._carry_over(step, walk.cursor)
            elif step is not None and (step.counted or not step.has_open_source):
                self.step = None
            if not self._in_epochs:  # a loop that counts its own epochs: one is done with the pass
                if walk.finished:
                    self.progress.next_epoch()
                self.cursors.begin_epoch()
            self._profiler.enter(None)
            self._activity.enter("what follows an epoch", limit=self._activity.patience)

    def _carry_over(self, step: Step, ended: Cursor) -> None:
        """Keeps the gradients of a pass that has ended before an optimizer stepped: the next batches add to them."""
        others = [(each, micro) for each, micro in step.micro_batches if each is not ended]
        # zip() may have asked another source for a batch, and dropped it.
        dropped = bool(others) and step.taken > step.trained
        if dropped or not all(micro.completes_epoch for _, micro in others):
            step.partly_ended = True
            return
        for each, _ in others:
            if each.is_open:
                self.cursors.leave(each, finished=True)
        self._gradients.carry_over(step)
        self.progress.examples += step.whole
        self.progress.tokens += step.tokens
        self.step = None

    def _drop_abandoned_step(self) -> None:
        """Drops the gradients of a batch that was left half way: it will be handed out again, whole."""
        step = self.step
        if step is None or not (step.was_left or step.is_bare):
            return
        if step.was_left and step.pending:
            if step.partly_ended:
                raise ConfigError(
                    "run.batches: of the sources that were walked together, one ended while gradients waited for a "
                    "step: its last batches would be lost, those of the others would come again. Call run.step at "
                    "the end of the loop"
                )
            self._gradients.abandon(step)
        self.step = None

    def close(self, at_once: bool = False) -> None:
        self.loaders.close(at_once)
        self.streams.close(at_once)


def _with_plain_places(micros: MicroBatches, name: str, tokens: Any = None) -> MicroBatches:
    """Yields the micro-batches of a stream of examples with so many tokens; refuses a position that cannot be saved."""
    looked = False
    with contextlib.closing(micros):
        for micro, batch in micros:
            if not looked and micro.place is not None:
                require_plain(micro.place(), name)
                looked = True
            yield (micro._replace(tokens=micro.whole * tokens) if tokens else micro), batch
