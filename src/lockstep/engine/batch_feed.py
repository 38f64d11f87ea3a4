"""Hands out batches: epoch by epoch, source by source, with a safe point before every step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.load import uneven_shares
from lockstep.config.schema import RunSettings
from lockstep.data.choosing import Asked, choose
from lockstep.data.cursors import Cursor, Cursors
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.loaders import Loaders, one_ahead
from lockstep.data.order import MicroBatch
from lockstep.data.progress import Progress
from lockstep.data.sources import check_stream, is_stateful, is_stream
from lockstep.data.stream import streamed
from lockstep.data.streams import Pass, Streams
from lockstep.distributed.group import Group
from lockstep.engine import places
from lockstep.engine.compile_guard import CompileGuard
from lockstep.engine.gradients import GradientTracker
from lockstep.engine.step import Step
from lockstep.errors import ConfigError
from lockstep.profiler import Profiler
from lockstep.runtime.base import Runtime
from lockstep.strategy import graphs
from lockstep.strategy.base import Strategy, dp_rank_of

logger = logging.getLogger(__name__)


class BatchFeed:
    """What one rank is given to train on, and where that leaves it: the progress, a cursor per source, the step."""

    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        settings: RunSettings,
        profiler: Profiler,
        guard: CompileGuard,
        safe_point: Callable[[], bool],
        gradients: GradientTracker,
    ) -> None:
        """`safe_point` is called where nothing is half done, and says whether to go on."""
        self._group, self._activity, self._strategy = group, group.activity, strategy
        self._profiler, self._guard, self._safe_point, self._gradients = profiler, guard, safe_point, gradients
        self._runtime, self._fixed_shapes = runtime, runtime.fixed_shapes
        self._seed = settings.seed
        self._dp_rank, self._shuffle_buffer = dp_rank_of(strategy, group), settings.data.shuffle_buffer
        self._loaders = Loaders(
            self._dp_rank, strategy.dp_size, settings.seed, settings.data, runtime, strategy.batch_multiple
        )
        self._streams = Streams(
            self._dp_rank, strategy.dp_size, settings.seed, self._loaders.loading, runtime.fixed_shapes,
            strategy.batch_multiple,
        )  # fmt: skip
        self.progress = Progress()
        self.cursors = Cursors()
        self.step: Step | None = None  # under way, or just done, until what follows it begins
        self.busy_since = 0.0
        self._in_epochs = False
        self.was_asked = False  # for an epoch or a batch
        self._told_uneven: set[int] = set()  # batch sizes that the ranks do not divide
        self._saved_as_done: int | None = None  # the epoch that was saved as one with nothing left to do

    def epochs(self, count: int | None, go_on: Callable[[], bool]) -> Iterator[int]:
        """Epochs still to do. One is done when the loop comes back for the next: what follows its last batch counts."""
        self._in_epochs = self.was_asked = True
        try:
            while go_on() and (count is None or self.progress.epoch < count):
                yield self.progress.epoch
                if go_on() or self.progress.epoch_ended:
                    self._leave_epoch()
        finally:
            self._in_epochs = False
            self.cursors.begin_epoch()  # who comes back to an epoch that was left in its midst goes on with it

    def position(self, explicit: bool) -> dict[str, Any]:
        """Where training is, to be saved.

        A save that the user's loop asks for after its inner loop is taken for the end of the epoch: what the loop did
        since the last batch is in it. One that comes by itself leaves what follows the last batch to be done.
        """
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

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate | None,
        name: str | None,
        *,
        shuffle: bool,
        drop_last: bool,
        accumulate: int,
        order: Asked = None,
        site: str | None = None,
    ) -> Iterator[Any]:
        accumulate *= self._strategy.micro_batches
        self._release_for(dataset)
        if is_stream(dataset):
            if order is not None:
                raise ConfigError(
                    f"run.batches: order is for data that has an index, and {type(dataset).__name__} is a stream, "
                    "which comes in the order that it has: leave it out"
                )
            yield from self._batches_of_stream(dataset, batch_size, collate, name, shuffle, drop_last, accumulate, site)
            return
        self._tell_uneven_shares(batch_size)
        check_dataset(dataset, "the dataset")
        chosen = choose(order, shuffle, dataset, batch_size, self._seed)
        source = self.cursors.find(dataset, chosen.count, name, site)
        plan = self._loaders.plan(dataset, batch_size, accumulate=accumulate, given=chosen, drop_last=drop_last)
        if plan.batches == 0:
            raise ConfigError(
                f"the training data has {chosen.length} examples, fewer than one batch of {batch_size}, and "
                "drop_last leaves out what does not fill a batch: lower batch_size or set drop_last to false"
            )
        facts = {
            "count": plan.count,
            "batch_size": batch_size,
            "drop_last": drop_last,
            "seed": self._seed,
            **chosen.facts(source.epoch),
        }
        is_new = not source.opened
        cursor = self._open(dataset, facts, name, site)
        if cursor is None:
            return
        if is_new or chosen.drawn_anew:
            self._compare(cursor, facts)
        loader = self._loaders.for_training(cursor.name, dataset, plan, collate)
        start = plan.batches if cursor.ended else cursor.batch
        micros = loader.epoch(cursor.epoch, start)
        if self._runtime.copies_ahead and loader.fetches_ahead:
            micros = one_ahead(micros, self._runtime.begin_move)
        yield from self._hand_out(cursor, micros, accumulate)

    def _batches_of_stream(
        self,
        data: Any,
        batch_size: int,
        collate: Collate | None,
        name: str | None,
        shuffle: bool,
        drop_last: bool,
        accumulate: int,
        site: str | None,
    ) -> Iterator[Any]:
        check_stream(data, "run.batches")
        source = self._streams.source(data)
        facts = {
            "count": source.pieces,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "shuffle_buffer": self._shuffle_buffer,
            "drop_last": drop_last,
            "seed": self._seed,
        }
        cursor = self._open(data, facts, name, site)
        if cursor is None:
            return
        if cursor.ended:
            self.cursors.leave(cursor, finished=True)
            return
        self._exchange_places()  # of a pass that was left in its midst and is gone on with
        walk = self._streams.training(
            data, batch_size, collate, accumulate, drop_last, epoch=cursor.epoch, start=cursor.batch,
            shuffle=shuffle, buffer=self._shuffle_buffer, saved=cursor.stream, name=cursor.name,
        )  # fmt: skip
        cursor.kind = walk.kind
        with contextlib.closing(walk.in_step(self._group)) as micros:
            yield from self._hand_out(cursor, _plain_places(micros, source.name), accumulate)

    def stream(
        self, batches: Iterable[Any], count: Callable[[Any], int], name: str | None, site: str, ahead: bool = False
    ) -> Iterator[Any]:
        self._release_for(batches)
        cursor = self._open(batches, {}, name, site)
        if cursor is None:
            return
        name = cursor.name
        if cursor.ended:
            self.cursors.leave(cursor, finished=True)
            return
        self._exchange_places()
        stateful = is_stateful(batches)
        if stateful and cursor.stream is not None:
            self._load_place(cursor, batches, name)
        elif cursor.batch:
            logger.warning(
                "epoch %d was interrupted after %d batches; %r cannot be entered in the middle, so that these are "
                "trained on again", self.progress.epoch, cursor.batch, name,
            )  # fmt: skip
            cursor.batch, cursor.stream = 0, None
        cursor.kind = "batches"
        micros = streamed(
            self._group, batches, count, name, self._dp_rank, self._strategy.dp_size, cursor.batch,
            [self._seed, cursor.epoch] if stateful or ahead else None,
        )  # fmt: skip
        with contextlib.closing(micros):
            yield from self._hand_out(cursor, _plain_places(micros, name), 1)

    def _load_place(self, cursor: Cursor, batches: Any, name: str) -> None:
        """Give a source of batches with a state the one that this rank's share of it had."""
        assert cursor.stream is not None
        saved = cursor.stream["places"]
        if len(saved) != self._strategy.dp_size:
            raise ConfigError(
                f"run.stream: {cursor.batch} batches of this pass over {name!r} were done by {len(saved)} ranks, each "
                f"of which had a share of it, and now there are {self._strategy.dp_size}: go on with {len(saved)}, or "
                "from a checkpoint at the end of an epoch"
            )
        batches.load_state_dict(saved[self._dp_rank])

    def _exchange_places(self) -> None:
        """Where streams are that have moved on: known by all ranks of all shares, as it is saved."""
        moved = self.cursors.moved_on
        if not moved:
            return
        mine = [each.place() for each in moved if each.place is not None]
        found = places.gathered(self._group, self._dp_rank, self._strategy.dp_size, mine, [each.name for each in moved])
        for cursor, of_ranks in zip(moved, found, strict=True):
            cursor.stream, cursor.place = {"kind": cursor.kind, "places": of_ranks}, None

    def for_evaluation(self, *args: Any, **how: Any) -> Any:
        """The loader of a dataset that is evaluated."""
        return self._loaders.for_evaluation(*args, **how)

    def evaluation_of_stream(self, data: Any, batch_size: int, collate: Collate | None, alone: bool) -> Pass:
        return self._streams.evaluating(data, batch_size, collate, alone)

    def count_step(self) -> bool:
        """An optimizer has stepped. The first one of a step moves progress on; whether this was it."""
        step, progress = self.step, self.progress
        if step is None or step.counted:
            return False
        taken = step.count()
        progress.step += 1
        progress.examples += step.whole
        progress.epoch_ended = any(micro.completes_epoch for micro in taken)
        progress.batch = max((micro.batch + 1 for micro in taken), default=0)
        return True

    def close(self, at_once: bool = False) -> None:
        self._loaders.close(at_once)
        self._streams.close(at_once)

    # Inside

    def _release_for(self, dataset: Any) -> None:
        """Drop the references that loaders hold to datasets, before a new one is matched to a cursor: it may take the
        place of one that nobody else holds."""
        if not self.cursors.knows(dataset):
            self._loaders.release(self.cursors.closed)
            self._streams.release()

    def _open(self, dataset: Any, facts: dict[str, Any], name: str | None, site: str | None) -> Cursor | None:
        self.was_asked = True
        self._forget_what_was_left()
        cursor = self.cursors.open(dataset, facts, name, site)
        if cursor is not None and self._in_epochs and self._saved_as_done == self.progress.epoch:
            self._saved_as_done = None
            logger.warning(
                "run.checkpoint was called in epoch %d before the pass over %s: a run that is resumed from there takes "
                "the epoch for done, and leaves this pass out. Call run.checkpoint after the last pass of an epoch",
                self.progress.epoch, cursor.name,
            )  # fmt: skip
        return cursor

    def _hand_out(self, cursor: Cursor, micros: Iterator[tuple[MicroBatch, Any]], accumulate: int) -> Iterator[Any]:
        """One micro-batch after the other, on the device, with a safe point before every step."""
        finished = False
        self.progress.batch = cursor.batch
        try:
            while True:
                if not self._joins_step(cursor):
                    self.step = None
                    if not self._safe_point():
                        return
                    self._profiler.next_step(self.progress.step + 1)
                self._activity.enter("data", self.progress.step + 1)
                self._profiler.enter("data")
                self.busy_since = time.perf_counter()
                following = next(micros, None)
                if following is None:
                    finished = True
                    break
                micro, batch = following
                continues = self.step is not None and self.step.has_taken(cursor)
                self.step = self.step or Step(self._strategy.dp_size)
                self.step.take(cursor, micro)
                self._strategy.sync_gradients(self.step.completes_batch)
                batch = self._strategy.move(batch, micro.number)
                filled = continues and accumulate == 1 and self._fixed_shapes
                self._guard.begin("a batch that was filled up" if filled else "a step", batch)
                if not continues:  # gradients of a batch's parts are added up: they must not be written over before
                    graphs.next_pass()
                self._activity.enter("loss")
                self._profiler.enter("forward")
                yield batch
        finally:
            self._leave(cursor, finished)

    def _joins_step(self, cursor: Cursor) -> bool:
        """Whether the next micro-batch of a source belongs to the step under way."""
        step = self.step
        if step is None or step.counted:
            return False
        # Another source is at hand; or this one, with the batch not complete, or with gradients that wait for a step.
        return not step.has_taken(cursor) or not step.completes_batch or step.pending

    def _leave(self, cursor: Cursor, finished: bool) -> None:
        if cursor.is_open:
            self.cursors.leave(cursor, finished)
        self._strategy.sync_gradients(True)
        if self.step is not None and (self.step.counted or not self.step.pending):
            self.step = None
        elif self.step is not None and finished:
            self._carry_over(self.step, cursor)
        if not self._in_epochs:  # a loop that counts its own epochs: one is done with the pass
            if finished:
                self.progress.next_epoch()
            self.cursors.begin_epoch()
        self._profiler.enter(None)
        self._activity.enter("what follows an epoch", limit=self._activity.patience)

    def _carry_over(self, step: Step, ended: Cursor) -> None:
        """A pass has ended with gradients that no optimizer has stepped with: the next batches add to them."""
        others = [(each, micro) for each, micro in step.at_hand if each is not ended]
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
        self.step = None

    def _leave_epoch(self) -> None:
        self.progress.next_epoch()
        self.cursors.begin_epoch()

    def _forget_what_was_left(self) -> None:
        """Gradients of a batch that was left half way are not the next one's: it will be handed out again, whole."""
        if self.step is not None and (self.step.was_left or self.step.is_bare):
            if self.step.was_left and self.step.pending:
                if self.step.partly_ended:
                    raise ConfigError(
                        "run.batches: of the sources that were walked together, one ended while gradients waited for a "
                        "step: its last batches would be lost, those of the others would come again. Call run.step at "
                        "the end of the loop"
                    )
                self._gradients.abandon(self.step)
            self.step = None

    def _compare(self, cursor: Cursor, facts: dict[str, Any]) -> None:
        """Ranks take their shares of one order: with another on one of them, examples would be left out."""
        if self._group.world_size == 1:
            return
        everywhere = self._group.gather(facts, f"the order of {cursor.name}")
        for rank, other in enumerate(everywhere):
            differ = [f"{name} {everywhere[0].get(name)!r} on rank 0, {other.get(name)!r} on rank {rank}"
                      for name in {**everywhere[0], **other} if everywhere[0].get(name) != other.get(name)]  # fmt: skip
            if differ:
                raise ConfigError(
                    f"run.batches: the ranks do not have the same order of {cursor.name}: {'; '.join(differ)}. Data, "
                    "weights, lengths and an order of one's own must be the same on all ranks: make them from the seed"
                )

    def _tell_uneven_shares(self, batch_size: int) -> None:
        uneven = uneven_shares(batch_size, self._strategy.dp_size, "batch_size")
        if uneven and batch_size not in self._told_uneven:
            self._told_uneven.add(batch_size)
            logger.info(uneven)


def _plain_places(micros: Iterator[tuple[MicroBatch, Any]], name: str) -> Generator[tuple[MicroBatch, Any], None, None]:
    """Micro-batches of a stream, after a look at whether the place in it can be saved at all."""
    looked = False
    for micro, batch in micros:
        if not looked and micro.place is not None:
            places.require_plain(micro.place(), name)
            looked = True
        yield micro, batch
