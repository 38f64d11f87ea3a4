"""One step of training: the backward pass of a loss, and the step of an optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError

from lockstep.distributed.group import Group
from lockstep.engine import closures
from lockstep.engine.batch_feed import BatchFeed
from lockstep.engine.compile_guard import CompileGuard
from lockstep.engine.loss_scale import LossScale
from lockstep.engine.models import MATCH, Entry, Models
from lockstep.engine.step import Step
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean
from lockstep.profiler import Profiler
from lockstep.record.aggregator import MetricAggregator
from lockstep.strategy.base import Strategy, dp_rank_of
from lockstep.strategy.fused import divides_gradients, dividing


class Stepper:
    """Makes gradients those of the whole global batch, and counts what was stepped."""

    def __init__(
        self,
        group: Group,
        strategy: Strategy,
        models: Models,
        feed: BatchFeed,
        aggregator: MetricAggregator,
        guard: CompileGuard,
        profiler: Profiler,
        logs_norm: bool | None = None,
    ) -> None:
        """With `logs_norm`, the norm of gradients is noted in every step; None: where clipping computes it anyway."""
        self._group, self._activity, self._strategy = group, group.activity, strategy
        self._models, self._feed, self._aggregator = models, feed, aggregator
        self._guard, self._profiler = guard, profiler
        self._logs_norm = logs_norm
        self.loss_scale: LossScale | None = None  # where a model computes in float16
        self._evaluations: closures.Evaluations | None = None  # while an optimizer evaluates a closure
        self._gradients = models.gradients

    @property
    def number(self) -> int:
        """The step that the batch at hand belongs to: under way until an optimizer has stepped."""
        step = self._feed.step
        return self._feed.progress.step + (0 if step is None or step.counted else 1)

    def backward(self, loss: Any, count: Any = None) -> None:
        total, count = loss_and_count(loss, count)
        self._aggregator.note_busy(time.perf_counter() - self._feed.busy_since)
        step = self._current()
        complete = step.completes_batch
        factor = step.weight if count is None else step.scale
        exchanges = self._group.world_size > 1 and complete
        number = self.number
        self._gradients.begin(step)
        self._guard.computed(total)
        evaluations = self._evaluations
        if evaluations is None or not evaluations.count:  # an optimizer that searches may try what is not finite
            self._aggregator.note_loss(number, total)
        self._activity.enter("gradient reduction" if exchanges else "backward", number, waits=exchanges)
        self._be_patient_while_compiling()
        self._profiler.enter("backward")
        try:
            self._weighed(total, factor).backward()  # type: ignore[no-untyped-call]
            self._strategy.computed(complete)
        except CheckpointError as error:
            raise _computed_otherwise(error) from error
        except RuntimeError as error:
            explained = self._strategy.explain(error)
            raise explained or self._group.explain(error, f"the gradients of step {number}") from error
        if evaluations is not None:
            evaluations.computed(total, factor, count)
        step.computed()
        self._gradients.add(step, None if count is None else count * factor)
        self._activity.enter("the optimizer")
        self._profiler.enter(None)

    def step(self, optimizer: Optimizer | None, closure: closures.Closure | None = None) -> bool:
        entry, optimizer, parameters = self._models.stepped_by(optimizer)
        step = self._current()
        closures.check(entry, optimizer, step, closure, self.loss_scale is not None)
        if not step.completes_batch:
            self._feed.busy_since = time.perf_counter()
            return False
        counts = self._gradients.counts_for(optimizer)
        self._profiler.enter("optimizer")
        self._reduce(parameters, counts)
        usable = self._usable(entry, parameters)
        if usable:
            divisor = self._clip(entry, optimizer, parameters) if closure is None else None
            if entry.average is not None:
                entry.average.begin()
            if closure is not None:
                self._evaluate(entry, optimizer, parameters, closure)
            else:
                with dividing(optimizer, divisor):
                    self._strategy.step(optimizer)
        self._note_learning_rate(entry, optimizer)
        self._gradients.stepped(optimizer, step)
        self._be_patient_while_compiling()
        self._strategy.stepped()
        first = self._feed.count_step()
        step.pending = False
        self._guard.end(self._feed.progress.step, again=not first)
        if usable and entry.average is not None:
            entry.average.update(self._feed.progress.step)
        self._activity.enter("the end", self._feed.progress.step)
        self._profiler.enter(None)
        return True

    def _evaluate(
        self, entry: Entry, optimizer: Optimizer, parameters: list[nn.Parameter], closure: closures.Closure
    ) -> None:
        """Step an optimizer that computes loss and gradients itself, by a closure."""

        def clip() -> None:
            self._clip(entry, optimizer, parameters, may_divide=False)

        if any(each.grad is not None for each in parameters):  # SAM begins with gradients that are there already
            clip()
        self._evaluations = evaluations = closures.Evaluations(self._strategy, optimizer, parameters, clip)
        try:
            self._strategy.step(optimizer, lambda: evaluations.evaluate(closure))
        finally:
            self._evaluations = None

    def _current(self) -> Step:
        """The step under way; a loop that brings its own data has one from its first backward pass on."""
        feed = self._feed
        if feed.step is None or (feed.step.counted and feed.step.is_bare):
            feed.step = Step(self._strategy.dp_size)
        return feed.step

    def _reduce(self, parameters: list[nn.Parameter], counts: list[Any]) -> None:
        """Make gradients those of the whole batch, where the backward pass left something to do."""
        if not self._strategy.reduces_in_step and not counts:
            return
        try:
            with self._activity.within("gradient reduction", waits=self._group.world_size > 1):
                self._strategy.reduce_gradients(parameters)
                if counts:
                    self._strategy.divide_gradients(parameters, counts)
        except RuntimeError as error:
            raise self._group.explain(error, f"the gradients of step {self.number}") from error

    def _weighed(self, total: Tensor, factor: float) -> Tensor:
        if self.loss_scale is not None:  # in float32: a loss in float16 would overflow at once
            return total.float() * (factor * self.loss_scale.of(self.number))
        return total if factor == 1.0 else total * factor

    def _usable(self, entry: Entry, parameters: list[nn.Parameter]) -> bool:
        """Whether there is something to step with; gradients of a scaled loss are then scaled back.

        Gradients are equal on all ranks once they are reduced, so that all of them skip, or none.
        """
        scale, number = self.loss_scale, self.number
        if scale is None:
            usable = not entry.skip_nan or self._strategy.gradients_are_finite(parameters)
            if not usable:
                self._aggregator.skipped(number)
            return usable
        usable = self._strategy.gradients_are_finite(parameters)
        used = scale.of(number)
        scale.noted(number, usable)
        if usable:
            self._strategy.multiply_gradients(parameters, torch.tensor(1.0 / used, device=parameters[0].device))
        else:
            self._aggregator.skipped(number, f"overflowed float16; the loss is scaled by {scale.next:g} from here on")
        return usable

    def _clip(
        self, entry: Entry, optimizer: Optimizer, parameters: list[nn.Parameter], may_divide: bool = True
    ) -> Tensor | None:
        """Clip, and note the norm that gradients had before; where none is asked for, none is computed.

        What is returned, the optimizer is to divide gradients by, if anything: that saves a pass over all of them.
        """
        divisor = None
        if entry.clip_norm is not None and may_divide and divides_gradients(optimizer):
            norm = self._strategy.gradient_norm(parameters)
            divisor = torch.clamp((norm + 1e-6) / entry.clip_norm, min=1.0).float()
        elif entry.clip_norm is not None:
            norm = self._strategy.clip_gradients(parameters, entry.clip_norm)
        elif self._logs_norm:
            norm = self._strategy.gradient_norm(parameters)
        clips = entry.clip_norm is not None
        if self._logs_norm or (clips and self._logs_norm is None):
            name = "gradient_norm" if len(self._models.optimizers) == 1 else f"gradient_norm/{entry.name}"
            # One value for all ranks: counted once, so that a resume on another number of ranks weighs it alike.
            self._aggregator.note(self.number, int(dp_rank_of(self._strategy, self._group) == 0), {name: norm})
        return divisor

    def _note_learning_rate(self, entry: Entry, optimizer: Optimizer) -> None:
        """The rates of this step: a scheduler may change them before the row is written."""
        name = "lr" if len(self._models.optimizers) == 1 else f"lr/{entry.name}"
        for number, group in enumerate(optimizer.param_groups):
            rate, match = group.get("lr"), group.get(MATCH)
            if rate is None or (number and match is None):  # of groups, those of the config have names
                continue
            called = f"{name}/{match}" if number else name
            self._aggregator.learning_rates[called] = rate.clone() if isinstance(rate, Tensor) else rate

    def _be_patient_while_compiling(self) -> None:
        if not self._guard.settled:
            self._activity.be_patient()


def _computed_otherwise(error: CheckpointError) -> ConfigError:
    """A block that is recomputed must find everything as it was the first time."""
    return ConfigError(
        "train.activation_checkpointing: a module computed something else when it was run again in the backward "
        "pass. Modules that "
        "are recomputed must not keep anything from one call to the next: switch off a cache of keys and values "
        f"(use_cache=False), or leave such modules out by a pattern. {str(error).strip().splitlines()[0]}"
    )


def loss_and_count(loss: Any, count: Any = None) -> tuple[Tensor, Any]:
    """A loss as a scalar and, where it is a sum, what it is a sum over."""
    if isinstance(loss, Mean):
        return loss.total, loss.count
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss must be a scalar tensor, the mean over the batch, or a lockstep.Mean; got a "
            f"{type(loss).__name__}: return the one value to train on, and give the others to run.log or metrics()"
        )
    if loss.dim() != 0:
        raise ConfigError(f"the loss must be a scalar, the mean over the batch; got shape {list(loss.shape)}")
    return loss, count
