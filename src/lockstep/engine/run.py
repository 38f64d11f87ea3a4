"""One rank's view of a run: everything that a training loop needs, and all of it in step with the other ranks.

A facade: the methods of each section below have their home in one part of the run (group, devices, models, feed,
stepper, evaluator, journal, checkpointer), which has the rest.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep import profiler
from lockstep import strategy as strategies
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.stateful import Stateful
from lockstep.config.objects import construct, import_object
from lockstep.config.optimizing import Compile, Ema
from lockstep.config.schema import RunSettings
from lockstep.config.strategy import COMM_HOOKS
from lockstep.data.choosing import Asked
from lockstep.data.cursors import call_site
from lockstep.data.loader import Collate
from lockstep.data.progress import Due, Progress
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.engine.batch_feed import BatchFeed
from lockstep.engine.compile_guard import CompileGuard, Phases
from lockstep.engine.control_sync import Asked as Requested
from lockstep.engine.control_sync import ControlSync, OutOfBandSync, OwnDataSteps
from lockstep.engine.ema import PREFIX, Average, ema_settings, in_place, measured_beside
from lockstep.engine.evaluator import Evaluator
from lockstep.engine.loop_checks import LoopChecks
from lockstep.engine.loss_scale import LossScale
from lockstep.engine.models import Entry, Models
from lockstep.engine.pretrained import Given
from lockstep.engine.setup import Devices, Preparation, check_model
from lockstep.engine.stepper import Stepper
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean, Measure
from lockstep.profiler import in_region
from lockstep.record import loggers, samples
from lockstep.record.aggregator import MetricAggregator
from lockstep.record.display import Display
from lockstep.record.logger import Kind
from lockstep.record.loggers import LoggerQueue
from lockstep.record.metric_writer import MetricWriter
from lockstep.record.timeline import Timeline
from lockstep.runtime.base import Runtime
from lockstep.runtime.generators import seed_generators
from lockstep.strategy.base import Strategy, dp_rank_of
from lockstep.strategy.compiled import how_to_compile
from lockstep.strategy.mesh import shard_rules

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_AFTER_FAILURE_SECONDS = 5.0  # for what loggers are still to be told


class Run:
    """What `main(run)` is given on every rank. Batch sizes are global; every decision is made once and shared."""

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
        """`guard` raises where the folder is not this run's any more; on rank 0 alone there is anything to ask.

        `chronicle`, on rank 0, is where it is noted when the run did what.
        """
        self.require_folder = guard
        self._timeline, self._phases = timeline, Phases(timeline) if timeline is not None else None
        self.topology, self.runtime, self.group = topology, runtime, group
        self.settings, self.folder = settings, folder
        self._activity, self._requests = group.activity, requests
        self.out_of_band = OutOfBandSync(group, lambda: requests.any) if group.world_size > 1 else None
        self._control_sync = ControlSync(group, requests, self.out_of_band)
        self._strategy = strategies.create(settings.strategy, runtime, group)
        hook = settings.strategy.comm_hook
        if hook is not None and hook.type not in COMM_HOOKS:
            self._strategy.use_comm_hook(import_object(hook.type, "strategy.comm_hook"))
        self.profiler = profiler.create(settings.profile, runtime.name, topology, folder, group.activity)
        self._devices = Devices(group, runtime, self._strategy)
        self._models = Models(self._strategy)
        logger_queues = self._make_loggers()
        keep = settings.checkpoint.keep
        metric_writer = (
            MetricWriter(folder, settings.log, display, logger_queues, timeline, keep) if group.rank == 0 else None
        )
        self.aggregator = MetricAggregator(
            group, metric_writer, settings.log.every, runtime, self._strategy.is_dp_leader
        )
        self.checkpointer = Checkpointer(
            group, runtime, self._strategy, settings.checkpoint, settings.timeouts.checkpoint, folder, self._models,
            settings.seed, guard,
        )  # fmt: skip
        self._preparation = Preparation(group, runtime, self._strategy, settings, self.checkpointer.storage)
        self._guard = CompileGuard(runtime, settings.xla.max_recompiles)
        self._feed = BatchFeed(
            group, runtime, self._strategy, settings, self.profiler, self._guard,
            self._safe_point, self._models.gradients,
        )  # fmt: skip
        self._stepper = Stepper(
            group, self._strategy, self._models, self._feed, self.aggregator, self._guard, self.profiler,
            settings.log.gradient_norm,
        )  # fmt: skip
        self._evaluator = Evaluator(
            group,
            runtime,
            self._strategy,
            self._models,
            self._feed,
            self.checkpointer,
            lambda: requests.leave is not None,
        )
        self._own_data = OwnDataSteps(runtime, self._act)
        self._checks = LoopChecks(group, runtime, self._strategy.dp_size)
        self.stopped: str | None = None  # why training ended before its limit, the same on all ranks
        self._fingerprint_due = Due(settings.watch.fingerprint_every)
        self._restored = self._may_begin = False
        self.began_at = 0  # the step that this start of the run went on from
        seed_generators(runtime, settings.seed)

    # Who takes part, and deciding together: the group. Every call must be made by all ranks, in the same order.

    @property
    def rank(self) -> int:
        """Who this process is: 0 to `world_size - 1`."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many processes train together, on all hosts."""
        return self.group.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.group.rank == 0

    @overload
    def agree(self, value: Callable[[], Value], name: str = ...) -> Value: ...

    @overload
    def agree(self, value: Value, name: str = ...) -> Value: ...

    def agree(self, value: Any, name: str = "a decision") -> Any:
        """Rank 0's value on every rank; a callable runs on rank 0 only, and its exception is raised on every rank."""
        return self.group.agree(value, name)

    def any(self, value: bool, name: str = "whether any rank wants to") -> bool:
        """Whether it is true on any rank; the same answer on all of them."""
        return self.group.any(value, name)

    def all(self, value: bool, name: str = "whether all ranks want to") -> bool:
        """Whether it is true on every rank; the same answer on all of them."""
        return self.group.all(value, name)

    def gather(self, value: Value, name: str = "a gathering") -> list[Value]:
        """Every rank's value, plain data, in the order of ranks, on every rank."""
        return self.group.gather(value, name)

    def barrier(self, name: str = "a barrier") -> None:
        """Wait until every rank is here; a rank that does not come is named."""
        self.group.barrier(name)

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchange bytes among all ranks; asking for some of them only is refused."""
        return self.group.rendezvous(tag, payload, ranks)

    def stop(self, reason: str) -> None:
        """End training on all ranks at the same step, whichever of them asks: `batches` and `epochs` then end there.

        All ranks come to know of it with the next pulse, about half a second later; `run.stopped` has the reason.
        """
        self._requests.stop = self._requests.stop or reason

    def working(self, name: str, limit: float) -> contextlib.AbstractContextManager[None]:
        """For something of one's own that may take longer than `timeouts.stall`: up to so many seconds."""
        return self._activity.within(name, limit=limit)

    # The devices

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.runtime.device

    @property
    def strategy(self) -> str:
        """How models and batches are spread: the name of the strategy."""
        return self._strategy.name

    @property
    def dp_rank(self) -> int:
        """Which share of every batch this rank computes. Ranks that split a model between them have the same one."""
        return dp_rank_of(self._strategy, self.group)

    @property
    def dp_size(self) -> int:
        """Into how many shares a batch is divided: the ranks, unless several work on one share."""
        return self._strategy.dp_size

    @property
    def process_index(self) -> int:
        """The rank, by the name that JAX has for it."""
        return self.rank

    @property
    def process_count(self) -> int:
        """The number of ranks, by the name that JAX has for it."""
        return self.world_size

    @property
    def addressable_device_count(self) -> int:
        """Devices that this process drives."""
        return self._devices.addressable

    @property
    def global_device_count(self) -> int:
        """Devices of all processes together."""
        return self._devices.everywhere

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The device meshes of SPMD by name; `mesh` is the one that batches are spread over."""
        return self._devices.meshes

    @property
    def mesh(self) -> Any:
        """The mesh that batches are spread over: of torch_xla under SPMD, else of torch, where one was asked for."""
        return self._devices.meshes.get("mesh")

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers: replicas then start equal, whatever each of them drew."""
        self._devices.broadcast_parameters(model)

    # The models

    @property
    def model(self) -> nn.Module:
        """What to call in training, where there is one model; with several, `models` has them by name."""
        return self._models.only().model

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper: what to evaluate and save; with several, `modules` has them by name."""
        return self._models.only().module

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the one model, if it has one."""
        return self._models.only().optimizer if self._models.entries else None

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """What to call in training, by name."""
        return {name: each.model for name, each in self._models.entries.items()}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The models without their wrappers, by name."""
        return self._models.modules

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by the names of their models."""
        return self._models.optimizers

    @property
    def compilations(self) -> dict[str, int]:
        """Programs that training steps compiled, by kind of step; nothing where nothing is compiled."""
        return dict(self._guard.compilations)

    def build(self, make: Callable[[], Value]) -> Value:
        """Make a model, or several in a mapping, before `setup`: `run.build(lambda: Net(1024))`.

        Where the strategy splits models over ranks, only rank 0 makes them with their values; the others get their part
        in `setup`. Elsewhere it is the same as calling it.
        """
        made: Value = self._strategy.build(make)
        return made

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        name: str | None = None,
        precision: str = "float32",
        clip_norm: float | None = None,
        compile: bool | str | Mapping[str, Any] | Compile = False,
        activation_checkpointing: str | None = None,
        on_nan: str = "stop",
        ema: float | Mapping[str, Any] | Ema | None = None,
        shard: Mapping[str, Any] | None = None,
        init_weights: Callable[[nn.Module], object] | None = None,
        init_from: Given | None = None,
    ) -> Any:
        """Place a model on the device, equal on all ranks. Returns what was given, in the same order.

        Called once for every model that is trained; with several, each has a `name`. With `on_nan="skip"`, a step whose
        gradients are not finite leaves the weights as they are, on all ranks. `shard` has sharding rules for SPMD, as
        `strategy.shard` in the config, which comes before it. `precision`, `compile`, `activation_checkpointing` and
        `ema` are as in
        the config's `train`. `init_weights(module)` gives values to the parameters of one module of a model that was
        made on the meta device; without it, the module's own `reset_parameters` does. `init_from` names weights to
        begin with, as in the config; a run that has a checkpoint goes on from that instead.
        """
        chosen, first = self._models.free_name(name), not self._models.entries
        if self._restored:
            raise ConfigError(f"run.setup of {chosen!r} comes after run.restore: set up every model before restoring")
        check_model(model, optimizer, precision)
        self._strategy.check_precision(precision)
        self.runtime.use_precision(precision)
        if precision == "fp16" and self._stepper.loss_scale is None:
            self._stepper.loss_scale = LossScale()
            self.register_state("loss scale", self._stepper.loss_scale)
        self.aggregator.forgive_nan = self.aggregator.forgive_nan or on_nan == "skip"
        self._strategy.use_rules(shard_rules(shard or {}))
        placed = self._preparation.of(
            model, optimizer, how_to_compile(compile), activation_checkpointing, init_weights, init_from, precision
        )
        average = None if ema is None else Average(model, ema_settings(ema), self.runtime)
        skips = on_nan == "skip"
        self._models.add(
            Entry(chosen, model, placed.model, optimizer, precision, clip_norm, skips, average, placed.frozen)
        )
        self._checks.watch(model, optimizer)
        if scheduler is not None:
            self.register_state("scheduler" if first else f"scheduler of {chosen}", scheduler)
        if first:
            # From here on ranks draw different numbers (dropout); until here they drew the same (initial weights).
            seed_generators(self.runtime, self.settings.seed, dp_rank_of(self._strategy, self.group))
        given = [placed.model, *(each for each in (optimizer, scheduler) if each is not None)]
        return given[0] if len(given) == 1 else tuple(given)

    @contextlib.contextmanager
    def frozen(self, model: nn.Module) -> Iterator[None]:
        """A model that gets no gradients while the block runs: the discriminator, while the generator learns."""
        copies = self._strategy.copies_of(model)
        trained = [each for copy in copies for each in copy.parameters() if each.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    # The data

    @property
    def progress(self) -> Progress:
        """Where training is: `epoch`, `step` and the rest that a checkpoint keeps of it."""
        return self._feed.progress

    def epochs(self, count: int | None) -> Iterator[int]:
        """Epochs still to do: from where the run was restored, up to `count` (without end where there is none).

        An epoch is done when the loop comes back for the next one, so that what follows its last batch belongs to it: a
        run that is interrupted there does it after it was resumed.
        """
        return self._feed.epochs(count, lambda: self.stopped is None)

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int = 1,
        collate: Collate | None = None,
        name: str | None = None,
        order: Asked = None,
    ) -> Iterator[Any]:
        """This rank's share of every global batch of a pass over the data, on the device.

        The data is a map-style dataset or a stream (docs/data.md).
        With `accumulate`, a share comes in so many micro-batches; `step` acts on the last. Between two batches is where
        a run that was asked to stop saves itself and leaves, on all ranks at once. Leaving the loop early leaves the
        pass where it is: the next call goes on from there. Every dataset has a position of its own; `name` tells two
        uses of one dataset apart. `order` is as `data.order` in the config: "shuffled", "sequential",
        {"type": "weighted", "weights": [...]}, {"type": "buckets", "lengths": [...]}, or a function of
        (epoch, seed, count).
        """
        self._checks.walks(dataset)
        return self._feed.batches(
            dataset, batch_size, collate, name, shuffle=shuffle, drop_last=drop_last, accumulate=accumulate,
            order=order, site=call_site(sys._getframe(1)),
        )  # fmt: skip

    @property
    def was_asked_for_batches(self) -> bool:
        """Whether this start of the run went on training, or would have, had there been anything left to do."""
        return self._feed.was_asked

    def stream(
        self, batches: Iterable[Any], count: Callable[[Any], int], name: str | None = None, *, ahead: bool = False
    ) -> Iterator[Any]:
        """Batches from a source that every rank has a share of, of whatever sizes, until no rank has any left.

        For batches that are made elsewhere: a loader of one's own, of which rank after rank has a part (`share` of
        `shares`). Gradients are those of the mean over all examples that the ranks have at hand, and every example
        counts once. An epoch that was interrupted goes on where it was, if the source has state_dict and
        load_state_dict, on as many ranks; otherwise it starts again from its beginning.

        Before each batch the ranks exchange how many examples they have. A source with a state is read some batches
        ahead, so that one exchange does for all of these; with `ahead` any source is. Leave it out where the next
        batch depends on the training of the last.
        """
        return self._feed.stream(batches, count, name, call_site(sys._getframe(1)), ahead)

    # The step

    def autocast(self, name: str | None = None) -> contextlib.AbstractContextManager[Any]:
        """The precision that setup was given, for the forward pass and the loss."""
        entries = self._models.entries
        chosen = entries[name] if name is not None else next(iter(entries.values()), None)
        return self.runtime.autocast(chosen.precision if chosen is not None else "float32")

    def region(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of the step that is to have a name of its own in the profile, where one is being taken."""
        return self.profiler.region(name)

    def backward(self, loss: Tensor | Mean, count: Tensor | float | None = None) -> None:
        """Gradients of the mean loss over the global batch, however it is spread over ranks and micro-batches.

        The loss is a mean over the examples of the batch at hand; or, with a `count` (or as a Mean), a sum over so much
        of it: tokens, pixels. The mean is then taken over all that the ranks counted.
        """
        step = self._feed.step
        if step is not None and step.counted and step.is_bare:  # the row of a step has what was logged after it
            self.aggregator.write_due_row(self.progress, self.seconds_since_start, wait=False)
        with self._checks.computing(loss, step is None or step.is_bare, step is None or step.completes_batch):
            self._stepper.backward(loss, count)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenates the tensors of all ranks along their first dimension, which may differ in length.

        Gradients flow back to every rank: a loss over gathered examples has the gradients that it has on one process. A
        rank whose share of the last batch is empty adds nothing. Called by all ranks.
        """
        step = self._feed.step
        mine = tensor[:0] if step is not None and step.examples == 0 and tensor.dim() else tensor
        with self._activity.within("run.all_gather", waits=self.world_size > 1):
            return self._strategy.all_gather(mine)

    def step(self, optimizer: Optimizer | None = None, closure: Callable[[], object] | None = None) -> bool:
        """Step an optimizer and clear its gradients; False, doing nothing, while micro-batches are missing.

        With several optimizers each is stepped on its own; together they are one step of the run. In a loop that does
        not use `batches`, this is where a run that was asked to stop saves itself and leaves, on all ranks at once. A
        `closure` is for an optimizer that computes the loss itself (LBFGS, SAM): it calls the model and run.backward on
        the current batch.
        """
        if not self._requests.begun:
            self._require_restore()
            self._requests.begun = self._activity.begun = True
        with self._checks.stepping(optimizer):
            stepped = self._stepper.step(optimizer, closure)
        if stepped and self._feed.step is not None and self._feed.step.is_bare:
            self._after_own_step(optimizer)
        return stepped

    def log(self, **values: Tensor | Mean | float) -> None:
        """Note values of the batch at hand; means over all ranks are written every `log.every`.

        Outside of a batch they are written as a row of their own, with the step at which they were noted.
        """
        self._activity.progress()
        step = self._feed.step
        totals = {name: value for name, value in values.items() if isinstance(value, Mean)}
        means = {name: value for name, value in values.items() if name not in totals} if totals else values
        if step is None:
            meter = self.aggregator.note_apart(self.progress)
            meter.add(self.progress.step, 1, means)
            for name, value in totals.items():
                meter.add_total(self.progress.step, name, value.total, value.count)
            return
        self.aggregator.note(self._stepper.number, step.examples, means)
        for name, value in totals.items():
            scale = step.scale
            total, count = (value.total, value.count) if scale == 1.0 else (value.total * scale, value.count * scale)
            self.aggregator.note_total(self._stepper.number, name, total, count)

    # Samples: something to look at, of rank 0; what other ranks give is ignored, and nobody waits for anybody. Kept in
    # the run's folder below samples/, and sent to every logger that can show it.

    def log_image(self, name: str, image: Any) -> None:
        """A tensor or array [C, H, W], [H, W, C] or [H, W] of uint8 or of floats from 0 to 1; or an image of PIL's."""
        self._sample(name, "image", samples.image, image)

    def log_text(self, name: str, text: str) -> None:
        """A text, as it is."""
        self._sample(name, "text", samples.text, text)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows of numbers, texts, truth values or None, one cell for each column."""
        self._sample(name, "table", samples.table, columns, rows)

    def log_figure(self, name: str, figure: Any) -> None:
        """Of matplotlib's, drawn at once, as an image: it may be closed after that."""
        self._sample(name, "image", samples.figure, figure)

    def _sample(self, name: str, kind: Kind, make: Callable[..., Any], *given: Any) -> None:
        self._activity.progress()
        step = self.progress.step if self._feed.step is None else self._stepper.number
        self.aggregator.sample(step, name, kind, make, *given)

    @property
    def completes_batch(self) -> bool:
        """Whether the micro-batch at hand is the last of its global batch: `step` acts on it."""
        return self._feed.step is None or self._feed.step.completes_batch

    # Evaluating

    @in_region("validate")
    def evaluate(
        self,
        measure: Measure,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        on: str = "all",
        collate: Collate | None = None,
        name: str = "validation",
    ) -> dict[str, float]:
        """Exact means over a dataset of what `measure(batch)` returns: one value per example, or a lockstep.Mean.

        Equal on all ranks. Runs on all of them or on rank 0 alone. Use run.module inside, never the wrapper: nothing
        then waits for others.
        """
        with self._noted("validate", name):
            return self._evaluator.evaluate(measure, dataset, batch_size, on, collate, name)

    @in_region("validate")
    def evaluate_or_leave(
        self,
        measure: Measure,
        datasets: Mapping[str, Dataset[Any]],
        batch_size: int,
        on: str,
        collate: Collate | None,
    ) -> dict[str, dict[str, Any]] | None:
        """The same, of several datasets by name, for whoever can begin it anew after a resume: None as soon as a rank
        is asked to leave.

        Where weights are averaged, what is found with the averages is there too, as `ema/loss` beside `loss`.
        """
        with self._noted("validate", ", ".join(datasets)):
            return measured_beside(
                self._measured_averages,
                self.runtime,
                lambda: self._evaluator.evaluate_or_leave(measure, datasets, batch_size, on, collate),
            )

    def asked_to_leave(self) -> bool:
        """Whether this rank was asked to: for work that can be gone on with, between two parts of it."""
        return self._requests.leave is not None

    def move(self, batch: Any) -> Any:
        """A batch on the device, for what is computed outside of `batches`."""
        return self._strategy.move(batch)

    @property
    def spread(self) -> Strategy:
        """How the model and its batches are spread."""
        return self._strategy

    def names_of(
        self, measure: Measure, dataset: Dataset[Any], batch_size: int, collate: Collate | None = None
    ) -> tuple[dict[str, Any], bool]:
        """What `evaluate_or_leave` finds by name, on one batch that leaves no trace, and whether that is all."""
        found, complete = self._evaluator.names_of(measure, dataset, batch_size, collate)
        more = {PREFIX + name: value for name, value in found.items()} if self._measured_averages else {}
        return found | more, complete

    @property
    def _measured_averages(self) -> list[Average]:
        return [each for each in self._models.averages if each.settings.measured]

    @property
    def averages_were_saved(self) -> bool:
        """Whether the weights that were loaded came with averages, of every model that is to have one."""
        return bool(self._models.averages) and all(each.was_saved for each in self._models.averages)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """While the block runs, models that were set up with `ema` have their averages for weights: to evaluate or to
        export them. Called by all ranks."""
        if not self._models.averages:
            raise ConfigError("run.averaged_weights: no model has an average: run.setup(model, optimizer, ema=0.999)")
        with in_place(self._models.averages):
            yield

    def evaluate_stream(
        self,
        measure: Measure,
        batches: Iterator[Any],
        count: Callable[[Any], int],
        expected: int | None = None,
        name: str = "validation",
    ) -> dict[str, float]:
        """Like evaluate, over batches that every rank has a share of; `expected` is how many examples they have."""
        with self._noted("validate", name):
            return self._evaluator.evaluate_stream(measure, batches, count, expected, name)

    # Saving and coming back: the checkpointer

    def register_state(self, name: str, part: Stateful, *, per_rank: bool = False) -> None:
        """Save and restore something else along with the models, now or after a restore.

        Where ranks have different states, each gets its own back. On another number of ranks such a state cannot be
        carried over: with `per_rank` it begins anew there, without it the restore is refused.
        """
        self.checkpointer.attached.register(name, part, "begin anew" if per_rank else "refuse")

    @in_region("checkpoint")
    def checkpoint(self, value: float | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything needed to go on bit for bit; `value` is what the best checkpoints are kept by.

        After the inner loop of an epoch, the epoch is saved as done: call it last.
        """
        self._save(value, metrics, explicit=True)

    def restore(self, step: int | None = None, best: bool = False) -> bool:
        """Go on from the newest good checkpoint of this run's folder; False where there is none.

        Or from that of a `step`, or from the best by the `value` that it was saved with: what is newer is then set
        aside, under another name, before anything is saved.
        """
        self._models.require_any()
        if step is not None and best:
            raise ConfigError(f"run.restore(step={step}, best=True): name one of them")
        state = self.checkpointer.restore(step, best)
        self._restored = self._activity.restores = True
        if state is None:
            self._control_sync.start(0, 0.0)
            self.aggregator.start_at(0)
            return False
        self._feed.load_position(state)
        self.aggregator.start_at(self.progress.step, state["journal"])
        self._control_sync.start(self.progress.step, state["seconds"])
        self.checkpointer.restored_to(self._feed.position(explicit=False))
        self.began_at = self.progress.step
        return True

    def load_weights(self, folder: Path, step: int, beside: Mapping[str, Stateful] | None = None) -> None:
        """The weights of a checkpoint of another run, to evaluate or use the model: nothing of that run is changed.

        `beside` has what else is to be loaded, by the names under which that run had attached it.
        """
        self._models.require_any()
        self.checkpointer.load_weights(folder, step, beside or {})
        self._restored = True
        self._control_sync.start(0, 0.0)
        self.aggregator.start_at(0)

    def newest_saved(self) -> tuple[int, Path] | None:
        """For rank 0: the step and folder of the newest checkpoint, once a save under way is on the disk."""
        return self.checkpointer.newest()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, restarts included, as all ranks know them."""
        return self._control_sync.clock

    @property
    def seconds_since_start(self) -> float:
        """Seconds since the run was started or restored, as all ranks know them: what intervals are measured by."""
        return self._control_sync.since_start

    def elapsed(self) -> float:
        """Seconds of training by this rank's own clock."""
        return self._control_sync.elapsed()

    def finish(self, status: str = "completed") -> None:
        """Write what is still unwritten: the last row, the save under way, what loggers have yet to be sent."""
        self.require_folder()
        self._checks.finish()
        self.aggregator.write_last_row(self.progress)
        self.aggregator.write_rest()
        self.checkpointer.finish()
        self.profiler.close()
        self._feed.close()
        self.aggregator.close(status)

    def end_workers(self) -> None:
        """However a run ends, its data workers end with it."""
        self._feed.close(at_once=True)

    def give_up(self) -> None:
        """What a run that failed still does: the save under way may come to its end."""
        self.profiler.give_up()
        self.checkpointer.give_up()
        self.aggregator.close("failed", _AFTER_FAILURE_SECONDS)

    # Inside

    def _make_loggers(self) -> list[LoggerQueue]:
        """Of rank 0. What is known to be wrong with one ends all ranks, before anything is trained."""
        made: list[LoggerQueue] = []
        if self.settings.log.has_loggers:
            self.group.agree(
                lambda: made.extend(loggers.create(self.folder, self.settings, import_object, construct)), "the loggers"
            )
        return made

    def _noted(self, kind: str, note: str | None = None) -> contextlib.AbstractContextManager[None]:
        if self._timeline is None:
            return contextlib.nullcontext()
        return self._timeline.during(kind, step=self.progress.step, note=note)

    def _save(self, value: float | None, metrics: Mapping[str, float] | None, explicit: bool) -> None:
        with self._noted("save"):
            self._save_now(value, metrics, explicit)

    def _save_now(self, value: float | None, metrics: Mapping[str, float] | None, explicit: bool) -> None:
        self._models.require_any()
        self._require_restore()
        # A row that is due belongs to what was before the checkpoint, not to what is resumed.
        self.aggregator.write_due_row(self.progress, self.seconds_since_start)
        self.aggregator.bring_together(self.progress)  # also makes sure that nothing after a NaN is ever saved
        position = self._feed.position(explicit)
        state = {"journal": self.aggregator.state_dict(), "seconds": self.seconds}
        about = {"epoch": self.progress.epochs_done, "world_size": self.world_size}
        self.checkpointer.save(self.progress.step, position, state, about, value, metrics, automatic=not explicit)

    def leave(self) -> NoReturn:
        """Save and leave here and now, on all ranks: one of them was asked to."""
        asked = self._control_sync.meet(self.progress.step)
        self._save_and_leave(str(asked.leave))

    def leave_unsaved(self) -> NoReturn:
        """Leave on all ranks, where there is nothing to save: the work is begun anew, or goes on from its parts."""
        asked = self._control_sync.meet(self.progress.step)
        self._feed.close()
        raise Preempted(str(asked.leave))

    def _save_and_leave(self, reason: str) -> NoReturn:
        with self.profiler.region("checkpoint"):
            self._save(None, None, explicit=False)
        # All ranks leave when it is on the disk: a launcher may end the rest as soon as the first one is gone.
        self.agree(lambda: self.checkpointer.settle(leaving=True), "the last save")
        self.profiler.close()
        self._feed.close()
        # Whoever asked waits `timeouts.stop` for all of it, and the save has had most of that.
        self.aggregator.close("preempted", self.settings.timeouts.stop / 4)
        raise Preempted(reason)

    def _require_restore(self) -> None:
        """Refuse a restart or resume that does not restore its checkpoint; asked before the first step or save."""
        if self._restored or self._may_begin:
            return
        self._may_begin = True
        if self.topology.attempt or self.topology.resumes:
            self.agree(self._require_nothing_saved, "whether a checkpoint is left unused")
        elif self.settings.launch.max_restarts and self.is_main:
            logger.warning(
                "launch.max_restarts is %d, but main does not call run.restore(): a restart cannot continue from a "
                "checkpoint. Call run.restore() after run.setup", self.settings.launch.max_restarts,
            )  # fmt: skip

    def _require_nothing_saved(self) -> None:
        steps = self.checkpointer.storage.steps()
        if steps:
            raise ConfigError(
                f"{f'this is restart {attempt}' if (attempt := self.topology.attempt) else 'the run is resumed'}, and "
                "main has not called run.restore(): it would begin at step 0 and set "
                f"{self.checkpointer.storage.path(steps[-1]).name} aside. Call run.restore() after run.setup"
            )

    def _safe_point(self) -> bool:
        """Between two steps, where nothing is half done: log, notice a failed save, stop if any rank was asked to."""
        self._own_data.act()
        self._act(self._look_around(rows=True))
        return self.stopped is None

    def _after_own_step(self, optimizer: Optimizer | None) -> None:
        """The safe point of a loop that brings its own data."""
        if not self._own_data.end_here(optimizer, len(self._models.optimizers)):
            return
        self._own_data.act()  # where no module was called since: the forward pass is compiled, or there is none
        asked = self._look_around(rows=False)
        self.stopped = self.stopped or asked.stop
        if asked.leave or asked.save:
            self._own_data.defer(asked)

    def _look_around(self, rows: bool) -> Requested:
        """What all ranks were asked for by now; with `rows`, what is due is written, too."""
        progress = self.progress
        if self._phases is not None and self._phases.at(progress.step, self._compiles):
            self._phases = None
        asked = self._control_sync.beat(progress.step)
        if self._control_sync.exchanged:
            self.aggregator.write_pending_row(wait=self.world_size > 1)
        if rows:
            self.aggregator.write_due_row(progress, self.seconds_since_start, wait=False)
        self.checkpointer.check()
        if self._fingerprint_due.now(progress, self.seconds_since_start) and progress.step:
            self.checkpointer.compared({}, f"the fingerprint of step {progress.step}", progress.step)
        return asked

    def _act(self, asked: Requested) -> None:
        """Leave, save or end training, as any rank was asked to."""
        if asked.leave:
            self._save_and_leave(asked.leave)
        if asked.save:
            with self.profiler.region("checkpoint"):
                self._save(None, None, explicit=False)
            self.checkpointer.settle(leaving=False)  # what is said to be saved is on the disk
            logger.info("saved at step %d: %s", self.progress.step, asked.save)
        self.stopped = self.stopped or asked.stop

    @property
    def _compiles(self) -> bool:
        return self.runtime.compiles_everything or self._preparation.compiles
