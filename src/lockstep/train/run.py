"""One rank's view of a run: everything that a training loop needs, and all of it in step with the other ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep import strategy as strategies
from lockstep.checkpoint.stateful import Stateful
from lockstep.config.load import check_batch_size
from lockstep.config.schema import RunSettings
from lockstep.data.loader import Collate, check_dataset
from lockstep.data.loaders import Loaders
from lockstep.data.order import MicroBatch
from lockstep.data.progress import Due
from lockstep.data.stream import counted, streamed
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError
from lockstep.profiler.base import in_region
from lockstep.record.display import Display
from lockstep.record.recorder import Record
from lockstep.runtime.base import Runtime
from lockstep.runtime.generators import seed_generators
from lockstep.strategy.rules import shard_rules
from lockstep.train.compile_guard import CompileGuard, be_patient_while_compiling
from lockstep.train.evaluation import Measure, combine, evaluating, measure_sums, sums_of
from lockstep.train.keeping import Keeping
from lockstep.train.requests import Preempted, Requests

logger = logging.getLogger(__name__)


class Run(Keeping):
    """What `main(run)` is given on every rank. Batch sizes are global; every decision is made once and shared."""

    def __init__(
        self,
        topology: Topology,
        runtime: Runtime,
        group: Group,
        settings: RunSettings,
        folder: Path,
        display: Display,
        requests: Requests,
    ) -> None:
        strategy = strategies.create(settings.strategy, runtime, group.world_size)
        record = Record(folder, settings.log, display) if group.rank == 0 else None
        super().__init__(topology, group, runtime, strategy, settings, folder, requests, record)
        self._model: nn.Module | None = None
        self._loaders = Loaders(self.rank, self.world_size, settings.seed, settings.data, runtime)
        self._guard = CompileGuard(runtime, settings.xla.max_recompiles)
        self._part: MicroBatch | None = (
            None  # the batch at hand, from when it is handed out until the step it belongs to
        )
        self._handed_out: MicroBatch | None = None  # the same, until the next one
        self._precision = "float32"
        self._clip_norm: float | None = None
        self._requests = requests
        self.stopped: str | None = None  # why training ended before its limit, the same on all ranks
        self._skip_nan = False
        self._fingerprint_due = Due(settings.watch.fingerprint_every)
        self._busy_since = 0.0
        seed_generators(runtime, settings.seed)

    # Who and where

    @property
    def model(self) -> nn.Module:
        """What to call in training."""
        return self._set_up(self._model)

    @property
    def compilations(self) -> dict[str, int]:
        """Programs that training steps compiled, by kind of step; nothing where nothing is compiled."""
        return dict(self._guard.compilations)

    # Deciding together; what needs no more than the group is inherited

    def stop(self, reason: str) -> None:
        """End training on all ranks at the same step, whichever of them asks: `batches` and `epochs` then end there.

        All ranks come to know of it with the next pulse, about half a second later; `run.stopped` has the reason.
        """
        self._requests.stop = self._requests.stop or reason

    def working(self, name: str, limit: float) -> contextlib.AbstractContextManager[None]:
        """For something of one's own that may take longer than `watch.stall_after`: up to so many seconds."""
        return self._activity.within(name, limit=limit)

    def region(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of the step that is to have a name of its own in the profile, where one is being taken."""
        return self.profiler.region(name)

    # Training

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        precision: str = "float32",
        clip_norm: float | None = None,
        compile: bool = False,
        on_nan: str = "stop",
        shard: Mapping[str, Any] | None = None,
    ) -> Any:
        """Place the model on the device, equal on all ranks. Returns what was given, in the same order.

        With `on_nan="skip"`, a step whose gradients are not finite leaves the weights as they are, on all ranks.
        `shard` has sharding rules for SPMD, as `strategy.shard` in the config, which comes before it.
        """
        if self._model is not None:
            raise ConfigError("run.setup was called twice: a run trains one model")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to train")
        self._precision, self._clip_norm, self._skip_nan = precision, clip_norm, on_nan == "skip"
        self.journal.forgive_nan = self._skip_nan
        if compile and self.runtime.name == "xla":
            logger.info("compile: everything is compiled on XLA devices; nothing more to do")
        elif compile:
            model.compile()
            be_patient_while_compiling(self._activity)
        self._kept.module, self._kept.optimizer = model, optimizer
        self._strategy.use_rules(shard_rules(shard or {}))
        self._activity.enter("placing the model", waits=self.world_size > 1)
        self._model = self._strategy.place(model)
        self._activity.enter("getting ready")
        if scheduler is not None:
            self.attach("scheduler", scheduler)
        # From here on ranks draw different numbers (dropout); until here they drew the same (initial weights).
        seed_generators(self.runtime, self.settings.seed, self.rank)
        given = [self._model, *(each for each in (optimizer, scheduler) if each is not None)]
        return given[0] if len(given) == 1 else tuple(given)

    def epochs(self, count: int | None) -> Iterator[int]:
        """Epochs still to do: from where the run was restored, up to `count` (without end where there is none)."""
        while self.stopped is None and (count is None or self.progress.epoch < count):
            yield self.progress.epoch

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int = 1,
        collate: Collate | None = None,
    ) -> Iterator[Any]:
        """This rank's share of every global batch of the current epoch, on the device.

        With `accumulate`, a share comes in so many parts; `step` acts on the last. Between two batches is where a run
        that was asked to stop saves itself and leaves, on all ranks at once. Leaving the loop early leaves the epoch
        where it is: the next call goes on from there.
        """
        accumulate *= self._strategy.parts
        check_batch_size(batch_size, self.world_size, accumulate, "batch_size")
        loader = self._loaders.get(
            dataset, batch_size, collate, shuffle=shuffle, drop_last=drop_last, accumulate=accumulate
        )
        if loader.walk.batches == 0:
            raise ConfigError(
                f"the training data has {loader.walk.count} examples, fewer than one batch of {batch_size}, and "
                "drop_last leaves out what does not fill a batch: lower batch_size or set drop_last to false"
            )
        yield from self._hand_out(loader.epoch(self.progress.epoch, self.progress.batch), accumulate)

    def stream(self, batches: Iterator[Any], count: Callable[[Any], int], name: str = "train") -> Iterator[Any]:
        """Batches from a source that every rank has a share of, of whatever sizes, until no rank has any left.

        For data that cannot be asked for by index. Gradients are those of the mean over all examples that the ranks
        have at hand, and every example counts once. An epoch that was interrupted starts again from its beginning.
        """
        if self.progress.batch:
            logger.warning(
                "epoch %d was interrupted after %d batches; %r cannot be entered in the middle, so that these are "
                "trained on again", self.progress.epoch, self.progress.batch, name,
            )  # fmt: skip
            self.progress.batch = 0
        yield from self._hand_out(streamed(self.group, batches, count, name), accumulate=1)

    def _hand_out(self, parts: Iterator[tuple[MicroBatch, Any]], accumulate: int) -> Iterator[Any]:
        """The parts of the current epoch one by one, each on the device and with a safe point before its batch."""
        self._part = None
        epoch = self.progress.epoch
        while True:
            if self._part is None:
                self._safe_point()
                if self.stopped is not None:
                    return
                self.profiler.next_step(self.progress.step + 1)
            self._activity.enter("data", self.progress.step + 1)
            self.profiler.enter("data")
            self._busy_since = time.perf_counter()
            following = next(parts, None)
            if following is None:
                break
            continues = self._part is not None
            self._part, batch = following
            self._handed_out = self._part
            if accumulate > 1 or self.runtime.fixed_shapes:
                self._strategy.sync_gradients(self._part.completes_batch)
            batch = self._strategy.move(batch)
            self._guard.begin("a batch that was filled up" if continues and accumulate == 1 else "a step", batch)
            self._activity.enter("loss")
            self.profiler.enter("forward")
            yield batch
        if self.progress.epoch == epoch:  # a loop that does not step still gets on
            self.progress.epoch, self.progress.batch = epoch + 1, 0
        self.profiler.enter(None)
        self._activity.enter("what follows an epoch", limit=self._activity.patience)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision that setup was given, for the forward pass and the loss."""
        return self.runtime.autocast(self._precision)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean loss over the global batch, however it is spread over ranks and parts."""
        if loss.dim() != 0:
            raise ConfigError(f"the loss must be a scalar, the mean over the batch; got shape {list(loss.shape)}")
        self.journal.note_busy(time.perf_counter() - self._busy_since)
        weight = 1.0 if self._part is None else self._part.weight
        exchanges = self.world_size > 1 and (self._part is None or self._part.completes_batch)
        doing = "gradient reduction" if exchanges else "backward"
        self._guard.computed(loss)
        self._activity.enter(doing, self.progress.step + 1, waits=exchanges)
        if not self._guard.settled:
            self._activity.be_patient()
        complete = self._part is None or self._part.completes_batch
        self.profiler.enter("backward")
        try:
            (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
            self._strategy.computed(complete)
            if complete:
                self._strategy.reduce_gradients(self.module)
        except RuntimeError as error:
            raise self.group.explain(error, f"the gradients of step {self.progress.step + 1}") from error
        self._activity.enter("the optimizer")
        self.profiler.enter(None)

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """Step the optimizer and clear the gradients; False, doing nothing, while parts of the batch are missing."""
        part, optimizer = self._part, optimizer or self.optimizer
        if part is not None and not part.completes_batch:
            self._busy_since = time.perf_counter()
            return False
        if optimizer is None:
            raise ConfigError("run.step needs an optimizer: give run.setup(model, optimizer) both")
        self.profiler.enter("optimizer")
        # Gradients are equal on all ranks once they are reduced, so that all of them skip, or none.
        if not self._skip_nan or self._gradients_are_finite():
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not self._guard.settled:
            self._activity.be_patient()
        self._strategy.stepped(self.module)
        self._advance(part)
        self._guard.end(self.progress.step)
        self._activity.enter("the end", self.progress.step)
        self.profiler.enter(None)
        return True

    def log(self, **values: Tensor | float) -> None:
        """Note values of the batch at hand; means over all ranks are written every `log.every`."""
        self._activity.progress()
        examples = 1 if self._handed_out is None else self._handed_out.examples
        # Before step() the batch at hand belongs to the step that is under way.
        self.journal.note(self.progress.step + (0 if self._part is None else 1), examples, values)

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
        """Exact means over a dataset of what `measure(batch)` returns, one value per example; equal on all ranks.

        Runs on all ranks or on rank 0 alone. Use run.module inside, never the wrapper: nothing then waits for others.
        """
        count = check_dataset(dataset, name)
        if self._kept.module is not None:
            self._equalize_buffers()
        alone = on == "rank0"
        loader = self._loaders.get(dataset, batch_size, collate, alone=alone)

        def here() -> Any:
            with evaluating(self._kept.module) if self._kept.module is not None else contextlib.nullcontext():
                return measure_sums(measure, loader, self._next_of(name), self.runtime.end_of_program)

        parts = [self.agree(here, f"{name} on rank 0")] if alone else self.gather(here(), name)
        return combine(parts, count, name)

    def evaluate_stream(
        self,
        measure: Measure,
        batches: Iterator[Any],
        count: Callable[[Any], int],
        expected: int | None = None,
        name: str = "validation",
    ) -> dict[str, float]:
        """Like evaluate, over batches that every rank has a share of; `expected` is how many examples they have."""
        if self._kept.module is not None:
            self._equalize_buffers()
        with evaluating(self._kept.module) if self._kept.module is not None else contextlib.nullcontext():
            mine = sums_of(measure, counted(batches, count), self._next_of(name), self.runtime.end_of_program)
        parts = self.gather(mine, name)
        return combine(parts, sum(seen for _, seen in parts) if expected is None else expected, name)

    def finish(self) -> None:
        """Write what is still unwritten: the last row, the save under way."""
        self.journal.write_last_row(self.progress, self._learning_rate())
        self._writer.finish()
        self.profiler.close()
        self._loaders.close()
        self.journal.close()

    def give_up(self) -> None:
        """What a run that failed still does: the save under way may come to its end."""
        self.profiler.give_up()
        self._writer.give_up()

    # Inside

    def _safe_point(self) -> None:
        """Between two steps, where nothing is half done: log, notice a failed save, stop if any rank was asked to."""
        progress = self.progress
        asked = self._pulse.beat(progress.step)
        self.write_due_row()
        self._writer.check()
        if self._fingerprint_due.now(progress, self.seconds_since_start) and progress.step:
            self._compared({}, f"the fingerprint of step {progress.step}")
        if asked.leave or asked.save:
            self.checkpoint()
        if asked.leave:
            # All ranks leave when it is on the disk: a launcher may end the rest as soon as the first one is gone.
            self.agree(self._writer.finish, "the last save")
            self.profiler.close()
            raise Preempted(asked.leave)
        if asked.save:
            logger.info("saved at step %d: %s", progress.step, asked.save)
        self.stopped = self.stopped or asked.stop

    def _gradients_are_finite(self) -> bool:
        norms = [each.grad.isfinite().all() for each in self.module.parameters() if each.grad is not None]
        if not norms or bool(torch.stack(norms).all()):
            return True
        self.journal.skipped(self.progress.step + 1)
        return False

    def _next_of(self, name: str) -> Callable[[Any], Any]:
        """Moves a batch to the device, and counts it as progress of whatever the batches are for."""

        def move(batch: Any) -> Any:
            self._activity.enter(name)
            return self._strategy.move(batch)

        return move

    def _advance(self, part: MicroBatch | None) -> None:
        progress = self.progress
        progress.step += 1
        progress.epoch_ended = False
        if part is not None:
            progress.batch = part.batch + 1
            progress.examples += part.whole
            if part.completes_epoch:
                progress.epoch, progress.batch, progress.epoch_ended = progress.epoch + 1, 0, True
        self._part = None
