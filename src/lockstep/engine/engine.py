"""The engine of one rank: makes the parts of a run and calls them in order, step by step, in step with other ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep import profiler
from lockstep import strategy as strategies
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.registered import Stateful
from lockstep.config.objects import construct, import_object
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.config.strategy import COMM_HOOKS
from lockstep.data.cursors import Due, Progress
from lockstep.data.loader import Collate
from lockstep.data.order import Order
from lockstep.data.source import Source
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.engine.batch_feed import BatchFeed, PlannedPass
from lockstep.engine.compile_guard import CompileGuard, Phases
from lockstep.engine.control_sync import NOTHING, Asked, ControlSync, OutOfBandSync
from lockstep.engine.devices import Devices
from lockstep.engine.ema import Average
from lockstep.engine.evaluator import Evaluator
from lockstep.engine.loop_checks import LoopChecks, compare_order, require_nothing_saved, warn_of_restarts
from lockstep.engine.models import Entry, Models
from lockstep.engine.setup import ModelSetup, SetupOptions
from lockstep.engine.stepper import LossScale, Stepper, check_closure, loss_and_count
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean, Measure
from lockstep.record import loggers
from lockstep.record.aggregator import MetricAggregator
from lockstep.record.display import Display
from lockstep.record.logger import Kind
from lockstep.record.loggers import LoggerQueue
from lockstep.record.metric_writer import MetricWriter
from lockstep.record.timeline import Timeline
from lockstep.runtime.base import Runtime, seed_generators

logger = logging.getLogger(__name__)

_AS_SET = "checkpoint.every"
_AFTER_FAILURE_SECONDS = 5.0  # for loggers that still have something to send


class Engine:
    """One rank's parts of a run. The training loop uses it through `lockstep.Run`."""

    def __init__(
        self,
        topology: Topology,
        runtime: Runtime,
        group: Group,
        settings: RunSettings,
        folder: Path,
        display: Display,
        requests: StopRequests,
        guard: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
    ) -> None:
        """`guard` raises where the folder is no longer this run's; rank 0 has the `timeline`."""
        self.topology, self.runtime, self.group, self.settings = topology, runtime, group, settings
        self.folder, self.require_folder, self.requests, self.activity = folder, guard, requests, group.activity
        self.timeline = timeline
        self._phases = Phases(timeline) if timeline is not None else None
        self.out_of_band = OutOfBandSync(group, requests) if group.world_size > 1 else None
        self.strategy = strategies.create(settings.strategy, runtime, group, settings.train.exact, settings.seed)
        self.control_sync = ControlSync(group, requests, self.strategy, self.out_of_band)
        hook = settings.strategy.comm_hook
        if hook is not None and hook.type not in COMM_HOOKS:
            self.strategy.use_comm_hook(import_object(hook.type, "strategy.comm_hook"))
        self.profiler = profiler.create(settings.profile, runtime.name, topology, folder, group.activity)
        self.devices = Devices(group, runtime, self.strategy)
        self.models = Models(self.strategy)
        queues, keep = self._make_loggers(), settings.checkpoint.keep
        writer = MetricWriter(folder, settings.log, display, queues, timeline, keep) if group.rank == 0 else None
        self.aggregator = MetricAggregator(group, writer, settings.log.every, runtime, self.strategy.is_dp_leader)
        self.checkpointer = Checkpointer(
            group, runtime, self.strategy, settings.checkpoint, settings.timeouts.checkpoint, folder, self.models,
            settings.seed, guard,
        )  # fmt: skip
        self.model_setup = ModelSetup(group, runtime, self.strategy, settings, self.checkpointer.storage)
        self.guard = CompileGuard(runtime, settings.xla.max_recompiles)
        self.feed = BatchFeed(group, runtime, self.strategy, settings, self.profiler, self.guard, self.models.gradients)
        self.stepper = Stepper(
            group, self.strategy, self.models, self.aggregator, self.guard, self.profiler, settings.log.gradient_norm
        )
        self.evaluator = Evaluator(group, runtime, self.strategy, self.models, self.feed, self.checkpointer, requests)
        self._waiting = NOTHING  # what ranks were asked for in a loop within a loop
        self.checks = LoopChecks(group, runtime, self.strategy.dp_size)
        self.stopped: str | None = None  # why training ended before its limit, the same on all ranks
        self._fingerprint_due = Due(settings.watch.fingerprint_every)
        # A custom loop saves by run.checkpoint(), and besides as often as it was told to; the trainer saves by itself.
        told = not isinstance(settings, RunConfig) and "every" in settings.checkpoint.model_fields_set
        self._save_due = Due(settings.checkpoint.every if told else None)
        self.restored = self._may_begin = False
        self.began_at = 0  # the step at which this start of the run began
        seed_generators(runtime, settings.seed)

    def _make_loggers(self) -> list[LoggerQueue]:
        """Makes rank 0's loggers. A wrong setting ends all ranks before anything is trained."""
        made: list[LoggerQueue] = []
        if self.settings.log.has_loggers:
            self.group.agree(
                lambda: made.extend(loggers.create(self.folder, self.settings, import_object, construct)), "the loggers"
            )
        return made

    @property
    def progress(self) -> Progress:
        return self.feed.progress

    @property
    def seconds_since_start(self) -> float:
        """Seconds since the run was started or restored, by the clock that all ranks share."""
        return self.control_sync.since_start

    # Models

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: Stateful | None,
        name: str | None,
        options: SetupOptions,
    ) -> nn.Module:
        """Returns what to call in training."""
        chosen, first = self.models.free_name(name), not self.models.entries
        if self.restored:
            raise ConfigError(f"run.setup of {chosen!r} comes after run.restore: set up every model before restoring")
        placed, frozen = self.model_setup.place(model, optimizer, options)
        if options.precision == "fp16" and self.stepper.loss_scale is None:
            self.stepper.loss_scale = LossScale()
            self.register_state("loss scale", self.stepper.loss_scale)
        self.aggregator.forgive_nan = self.aggregator.forgive_nan or options.skips_nan
        average = None if options.ema is None else Average(model, options.ema, self.runtime)
        how = (options.precision, options.clip_norm, options.skips_nan)
        self.models.add(Entry(chosen, model, placed, optimizer, *how, average, frozen))
        self.checks.watch(model, optimizer)
        if scheduler is not None:
            self.register_state("scheduler" if first else f"scheduler of {chosen}", scheduler)
        if first:
            # From here on ranks draw different numbers (dropout); until here they drew the same (initial weights).
            seed_generators(self.runtime, self.settings.seed, *self.strategy.place_of_generators)
        return placed

    # Data and steps

    def epochs(self, count: int | None) -> Iterator[int]:
        self.feed.enter_epochs()
        try:
            while self._goes_on() and (count is None or self.progress.epoch < count):
                yield self.progress.epoch
                if self._goes_on() or self.progress.epoch_ended:
                    self.feed.next_epoch()
        finally:
            self.feed.leave_epochs()

    def _goes_on(self) -> bool:
        return self.stopped is None

    def steps(self, count: int | None) -> Iterator[int]:
        self.feed.enter_steps()
        try:
            while self._begin_step() and (count is None or self.progress.step < count):
                yield self.feed.begin_own_step()
                self.feed.count_step()
        finally:
            self.feed.leave_steps()

    def batches(self, source: Source, **how: Any) -> Iterator[Any]:
        yield from self._walk(self.feed.plan(source, **how))

    def stream(self, batches: Iterable[Any], count: Callable[[Any], int], **how: Any) -> Iterator[Any]:
        yield from self._walk(self.feed.plan_stream(batches, count, **how))

    def _walk(self, planned: PlannedPass) -> Iterator[Any]:
        """Yields one micro-batch after the other, with a safe point before every step."""
        walk = self.feed.open(planned)
        if walk is None:
            return
        try:
            while self.feed.continues_step(walk) or self._begin_step(inner=self.feed.is_inner(walk)):
                batch = self.feed.next(walk)
                if walk.finished:
                    break
                yield batch
        finally:
            self.feed.leave(walk)

    def _begin_step(self, inner: bool = False) -> bool:
        """Passes a safe point. Returns whether to go on with another step. In the `inner` of two loops, what ranks are
        asked for waits for the outer one, whose batch is not done."""
        self.feed.step = None
        asked = self._waiting.with_later(self._sync())
        self._waiting = asked if inner else NOTHING
        if not inner:
            self._act(asked)
        if self.stopped is not None:
            return False
        self.profiler.next_step(self.progress.step + 1)
        return True

    def backward(self, loss: Tensor | Mean, count: Tensor | float | None) -> None:
        total, count = loss_and_count(loss, count)
        feed, step = self.feed, self.feed.required_step("run.backward")
        with self.checks.computing(total, step.is_bare, step.completes_batch):
            self.aggregator.note_busy(time.perf_counter() - feed.busy_since)
            self.stepper.backward(step, feed.step_number, total, count)

    def step(self, optimizer: Optimizer | None, closure: Callable[[], object] | None) -> bool:
        """Steps an optimizer and counts the step. Returns False while micro-batches are missing."""
        if not self.requests.begun:
            self._require_restore()
            self.requests.begun = self.activity.begun = True
        with self.checks.stepping(optimizer):
            return self._step_and_count(optimizer, closure)

    def _step_and_count(self, optimizer: Optimizer | None, closure: Callable[[], object] | None) -> bool:
        feed, stepped = self.feed, self.models.stepped_by(optimizer)
        step = feed.current_step()
        check_closure(stepped[0], stepped[1], step, closure, self.stepper.loss_scale is not None)
        if closure is not None:
            feed.required_step("run.step with a closure")
        if not step.completes_batch:
            if self.strategy.leaves:
                self.strategy.keep_gradients(stepped[2])
                self.models.gradients.keep(stepped[1])
            self.models.gradients.want(stepped[1])
            feed.busy_since = time.perf_counter()
            return False
        number = feed.step_number
        averages = self.stepper.step(stepped, step, number, closure)
        first = feed.count_step()
        step.pending = False
        self.guard.end(number, again=not first)
        for average in averages:
            average.update(number)
        self.activity.enter("the end", number)
        self.profiler.enter(None)
        return True

    def gradients(self, optimizer: Optimizer | None) -> dict[str, Tensor]:
        stepped, step = self.models.stepped_by(optimizer), self.feed.step
        if step is None or not step.completes_batch:
            return {}
        if self.strategy.leaves and step.trained < step.taken:  # the last leaf is still to be computed
            return {}
        return self.stepper.finished(stepped, step, self.feed.step_number)

    def all_gather(self, tensor: Tensor) -> Tensor:
        step = self.feed.step
        mine = tensor[:0] if step is not None and step.examples == 0 and tensor.dim() else tensor
        with self.activity.within("run.all_gather", waits=self.group.world_size > 1):
            return self.strategy.all_gather(mine)

    def log(self, values: Mapping[str, Tensor | Mean | float]) -> None:
        self.activity.progress()
        step, progress = self.feed.step, self.progress
        totals = {name: value for name, value in values.items() if isinstance(value, Mean)}
        means = {name: value for name, value in values.items() if name not in totals} if totals else values
        if step is None:
            meter = self.aggregator.note_apart(progress)
            meter.add(progress.step, 1, means)
            for name, value in totals.items():
                meter.add_total(progress.step, name, value.total, value.count)
            return
        self.aggregator.note(self.feed.step_number, step.examples, means)
        for name, value in totals.items():
            scale = step.scale
            total, count = (value.total, value.count) if scale == 1.0 else (value.total * scale, value.count * scale)
            self.aggregator.note_total(self.feed.step_number, name, total, count)

    def log_sample(self, name: str, kind: Kind, make: Callable[..., Any], *given: Any) -> None:
        self.activity.progress()
        self.aggregator.sample(self.feed.step_number, name, kind, make, *given)

    # Safe points: between two steps, where nothing is half done

    def _sync(self) -> Asked:
        """Returns what any rank was asked for by now, and writes the row that is due."""
        progress = self.progress
        compiles = self.runtime.compiles_everything or self.model_setup.compiles
        if self._phases is not None and self._phases.at(progress.step, compiles):
            self._phases = None
        asked = self.control_sync.beat(progress.step)
        if progress.step > self.began_at and self._save_due.now(progress, self.seconds_since_start):
            asked = replace(asked, save=asked.save or _AS_SET)
        if self.control_sync.exchanged:
            self.aggregator.write_pending_row(wait=self.group.world_size > 1)
        self.aggregator.write_due_row(progress, self.seconds_since_start, wait=False)
        self.checkpointer.check()
        if self._fingerprint_due.now(progress, self.seconds_since_start) and progress.step:
            self.checkpointer.compared({}, f"the fingerprint of step {progress.step}", progress.step)
        return asked

    def _act(self, asked: Asked) -> None:
        """Leaves, saves or ends training, as any rank was asked to."""
        if asked.leave:
            self._save_and_leave(asked.leave)
        if asked.save:
            with self.profiler.region("checkpoint"):
                self.save(None, None, explicit=False)
            if asked.save != _AS_SET:
                self.checkpointer.settle(leaving=False)  # what is said to be saved is on the disk
                logger.info("saved at step %d: %s", self.progress.step, asked.save)
        self.stopped = self.stopped or asked.stop

    # Evaluation

    def evaluate(self, measure: Measure, source: Source, on: str, name: str) -> dict[str, float]:
        if isinstance(source.order, Order):
            compare_order(self.group, name, source.order.facts(0))
        with self.profiler.region("validate"), self._noted("validate", name):
            return self.evaluator.evaluate(measure, source.examples, source.batch_size, on, source.collate, name)

    def evaluate_or_leave(
        self, measure: Measure, datasets: Mapping[str, Dataset[Any]], batch_size: int, on: str, collate: Collate | None
    ) -> dict[str, dict[str, Any]] | None:
        """Evaluates several datasets; None, on all ranks, as soon as one of them is asked to leave. Where weights are
        averaged, the metrics of the averages are `ema/loss` beside `loss`."""
        with self.profiler.region("validate"), self._noted("validate", ", ".join(datasets)):
            return self.evaluator.evaluate_or_leave(measure, datasets, batch_size, on, collate)

    def evaluate_stream(
        self, measure: Measure, batches: Iterator[Any], count: Callable[[Any], int], expected: int | None, name: str
    ) -> dict[str, float]:
        """Evaluates batches that every rank has different ones of; `expected` is how many examples they have."""
        with self._noted("validate", name):
            return self.evaluator.evaluate_stream(measure, batches, count, expected, name)

    def _noted(self, kind: str, note: str | None = None) -> contextlib.AbstractContextManager[None]:
        if self.timeline is None:
            return contextlib.nullcontext()
        return self.timeline.during(kind, step=self.progress.step, note=note)

    # Checkpoints

    def register_state(self, name: str, part: Stateful, *, per_rank: bool = False) -> None:
        self.checkpointer.registered.register(name, part, "begin anew" if per_rank else "refuse")

    def save(self, value: float | None, metrics: Mapping[str, float] | None, explicit: bool) -> None:
        with self._noted("save"):
            self.models.require_own_weights()
            self._require_restore()
            progress = self.progress
            # A row that is due belongs to what was before the checkpoint, not to what is resumed.
            self.aggregator.write_due_row(progress, self.seconds_since_start)
            self.aggregator.bring_together(progress)  # also makes sure that nothing after a NaN is ever saved
            position = self.feed.position(explicit)
            state = {"metrics": self.aggregator.state_dict(), "seconds": self.control_sync.clock}
            about = {"epoch": progress.epochs_done, "world_size": self.group.world_size}
            self.checkpointer.save(progress.step, position, state, about, value, metrics, automatic=not explicit)

    def restore(self, step: int | None, best: bool) -> bool:
        self.models.require_any()
        if step is not None and best:
            raise ConfigError(f"run.restore(step={step}, best=True): name one of them")
        state = self.checkpointer.restore(step, best)
        self.restored = self.activity.restores = True
        if state is None:
            self.control_sync.start(0, 0.0)
            self.aggregator.start_at(0)
            return False
        self.feed.load_position(state)
        self.aggregator.start_at(self.progress.step, state["metrics"])
        self.control_sync.start(self.progress.step, state["seconds"])
        self.checkpointer.restored_to(self.feed.position(explicit=False))
        self.began_at = self.progress.step
        return True

    def load_weights(self, folder: Path, step: int, beside: Mapping[str, Stateful]) -> None:
        """Loads the weights of a checkpoint of another run, and what `beside` names of what it had registered."""
        self.models.require_any()
        self.checkpointer.load_weights(folder, step, beside)
        self.restored = True
        self.control_sync.start(0, 0.0)
        self.aggregator.start_at(0)

    def _require_restore(self) -> None:
        """Refuses a restart or resume that does not restore its checkpoint, before the first step or save."""
        if self.restored or self._may_begin:
            return
        self._may_begin = True
        if self.topology.attempt or self.topology.resumes:
            unused = partial(require_nothing_saved, self.checkpointer.storage, self.topology.attempt)
            self.group.agree(unused, "whether a checkpoint is left unused")
        elif self.settings.launch.max_restarts and self.group.rank == 0:
            warn_of_restarts(self.settings.launch.max_restarts)

    # The end

    def leave(self) -> NoReturn:
        """Saves and leaves now, on all ranks: one of them was asked to."""
        self._save_and_leave(str(self.control_sync.meet(self.progress.step).leave))

    def leave_unsaved(self) -> NoReturn:
        """Leaves on all ranks, where there is nothing to save."""
        asked = self.control_sync.meet(self.progress.step)
        self.feed.close()
        raise Preempted(str(asked.leave))

    def _save_and_leave(self, reason: str) -> NoReturn:
        with self.profiler.region("checkpoint"):
            self.save(None, None, explicit=False)
        # All ranks leave when it is on the disk: a launcher may end the rest as soon as the first one is gone.
        self.group.agree(lambda: self.checkpointer.settle(leaving=True), "the last save")
        self.profiler.close()
        self.feed.close()
        # Whoever asked waits `timeouts.stop` for all of it, and the save has had most of that.
        self.aggregator.close("preempted", self.settings.timeouts.stop / 4)
        raise Preempted(reason)

    def finish(self, status: str = "completed") -> None:
        """Writes what is still unwritten: the last row, the current save, what loggers have yet to send."""
        self.require_folder()
        self.checks.finish()
        self.aggregator.write_last_row(self.progress)
        self.aggregator.write_rest()
        self.checkpointer.finish()
        self.profiler.close()
        self.feed.close()
        self.aggregator.close(status)

    def give_up(self) -> None:
        """Ends a run that failed; the save that has begun may finish."""
        self.profiler.give_up()
        self.checkpointer.give_up()
        self.aggregator.close("failed", _AFTER_FAILURE_SECONDS)

    def end_workers(self) -> None:
        """Ends the data workers at once, however the run ends."""
        self.feed.close(at_once=True)
