"""The backward pass of a loss and the step of an optimizer; closures (LBFGS, SAM); loss scaling for float16."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointError

from lockstep.distributed.group import Group
from lockstep.engine.compile_guard import CompileGuard
from lockstep.engine.ema import Average
from lockstep.engine.models import MATCH, Entry, Models, Stepped
from lockstep.engine.step import Step
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean
from lockstep.profiler import Profiler
from lockstep.record.aggregator import MetricAggregator
from lockstep.shown import brief
from lockstep.strategy.base import Strategy
from lockstep.strategy.optimizer_step import divides_gradients, dividing, meets
from lockstep.strategy.parameters import multiply_gradients

logger = logging.getLogger(__name__)


class Stepper:
    """Makes the gradients of every rank those of the global batch, and steps optimizers with them."""

    def __init__(
        self,
        group: Group,
        strategy: Strategy,
        models: Models,
        aggregator: MetricAggregator,
        guard: CompileGuard,
        profiler: Profiler,
        logs_norm: bool | None = None,
    ) -> None:
        """With `logs_norm`, the gradient norm is logged in every step; with None, where clipping computes it anyway."""
        self._group, self._activity, self._strategy = group, group.activity, strategy
        self._models, self._aggregator = models, aggregator
        self._guard, self._profiler = guard, profiler
        self._logs_norm = logs_norm
        self.loss_scale: LossScale | None = None  # where a model computes in float16
        self._evaluations: Evaluations | None = None  # while an optimizer evaluates a closure
        self._gradients = models.gradients
        self._warned = False  # of a step without gradients
        # By optimizer: those whose gradients are those of the whole batch, and whether they are usable.
        self._finished: dict[int, tuple[Step, bool, list[nn.Parameter]]] = {}
        self.before_step: Callable[[Optimizer], None] | None = None  # called with finished gradients

    def backward(self, step: Step, number: int, total: Tensor, count: Any) -> None:
        """Computes gradients of the loss of the current micro-batch of step `number`."""
        if self._strategy.leaves and step.counted:
            raise ConfigError(
                f"run.backward: train.exact: {self._strategy.leaves} computes every batch leaf by leaf, and this loss "
                "comes after an optimizer has stepped for the batch: only its last leaf would see the new weights. "
                "Call run.backward for all losses before run.step, or leave train.exact out"
            )
        if self._finished:
            self._refuse_after_gradients(step)
        if not total.requires_grad:
            raise ConfigError(
                "run.backward: the loss has no gradient: it was computed under torch.no_grad(), detached, or from "
                "frozen parameters alone. Compute it by the model that run.setup returned, with gradients"
            )
        complete = step.completes_batch
        factor = step.weight if count is None else step.scale
        exchanges = self._group.world_size > 1 and complete
        self._gradients.begin(step)
        self._guard.computed(total)
        evaluations = self._evaluations
        if evaluations is None or not evaluations.count:  # an optimizer that searches may try what is not finite
            self._aggregator.note_loss(number, total)
        self._activity.enter("gradient reduction" if exchanges else "backward", number, waits=exchanges)
        self._be_patient_while_compiling()
        self._profiler.enter("backward")
        self._strategy.before_backward()
        try:
            self._weighed(total, factor, number).backward()  # type: ignore[no-untyped-call]
            self._strategy.computed(complete)
        except CheckpointError as error:
            raise _computed_otherwise(error) from error
        except RuntimeError as error:
            explained = self._strategy.explain(error)
            raise explained or self._group.explain(error, f"the gradients of step {number}") from error
        if evaluations is not None:
            evaluations.computed(total, factor, count)
        step.computed()
        self._gradients.add(step, None if count is None else count * factor, self.loss_scale is not None)
        self._activity.enter("the optimizer")
        self._profiler.enter(None)

    def step(self, stepped: Stepped, step: Step, number: int, closure: Closure | None = None) -> list[Average]:
        """Steps an optimizer and clears its gradients. Returns the weight averages to update."""
        entry, optimizer, parameters = stepped
        self._profiler.enter("optimizer")
        if closure is None:
            self._gradients.require_known(parameters)
        usable = self.finish(stepped, step, number)
        if closure is None and not self._warned and all(each.grad is None for each in parameters):
            self._warned = True
            logger.warning(
                "run.step: no gradients at step %d, so no weight changes: call run.backward(loss) before", number
            )
        if usable:
            divisor = self._clip(entry, optimizer, parameters, number) if closure is None else None
            for average in self._models.averages_of(stepped):
                average.begin()
            if closure is not None:
                self._evaluate(entry, optimizer, parameters, closure, number)
            else:
                self._step(optimizer, divisor, number)
        self._finished.pop(id(optimizer), None)
        self._note_learning_rate(entry, optimizer)
        self._gradients.stepped(optimizer, step)
        self._be_patient_while_compiling()
        self._strategy.stepped()
        return self._models.averages_of(stepped) if usable else []

    def _step(self, optimizer: Optimizer, divisor: Tensor | None, number: int) -> None:
        """Ranks may meet there: where each computes some of the matrices, for all."""
        waits = self._group.world_size > 1 and meets(optimizer)
        try:
            if divisor is None and not waits:  # the common case, without what it costs to enter and leave
                self._strategy.step(optimizer)
            else:
                with dividing(optimizer, divisor), self._activity.within("the optimizer", waits=waits):
                    self._strategy.step(optimizer)
        except RuntimeError as error:
            raise self._group.explain(error, f"the optimizer of step {number}") from error

    def _refuse_after_gradients(self, step: Step) -> None:
        for key, (finished, _, parameters) in list(self._finished.items()):
            if finished is not step or all(each.grad is None for each in parameters):  # the loop has dropped them
                del self._finished[key]
            elif self._evaluations is None:
                raise ConfigError(
                    "run.backward: comes after run.gradients, which has finished the gradients of this batch: call "
                    "run.backward for all losses before, or run.step or zero_grad() of the optimizer"
                )

    def finished(self, stepped: Stepped, step: Step, number: int) -> dict[str, Tensor]:
        """Returns the gradients of the whole batch by parameter."""
        if self._evaluations is not None:
            raise ConfigError(
                "run.gradients: in a closure gradients are not finished yet: use the callback before_optimizer_step"
            )
        has_stepped = not self._strategy.leaves and all(each.grad is None for each in stepped[2])
        if not has_stepped:
            self.finish(stepped, step, number)
        return self._models.gradients_of(stepped)

    def finish(self, stepped: Stepped, step: Step, number: int) -> bool:
        """Makes the gradients of an optimizer those of the whole batch, once. Returns whether to step with them."""
        entry, optimizer, parameters = stepped
        self._strategy.reshard()
        known = self._finished.get(id(optimizer))
        if known is None or known[0] is not step:
            self._gradients.require_unchanged()
            self._reduce(parameters, self._gradients.counts_for(optimizer), number)
            known = self._finished[id(optimizer)] = step, self._usable(entry, parameters, number), parameters
        return known[1]

    def _evaluate(
        self, entry: Entry, optimizer: Optimizer, parameters: list[nn.Parameter], closure: Closure, number: int
    ) -> None:
        """Steps an optimizer that computes loss and gradients itself, by a closure."""

        def clip() -> None:
            self._clip(entry, optimizer, parameters, number, may_divide=False)

        if any(each.grad is not None for each in parameters):  # SAM begins with gradients that are there already
            clip()
        self._evaluations = evaluations = Evaluations(self._strategy, optimizer, parameters, clip)
        try:
            self._strategy.step(optimizer, lambda: evaluations.evaluate(closure))
        finally:
            self._evaluations = None

    def _reduce(self, parameters: list[nn.Parameter], counts: list[Any], number: int) -> None:
        """Reduces gradients over ranks, where the backward pass has left something to do."""
        if not self._strategy.reduces_in_step and not counts:
            return
        try:
            with self._activity.within("gradient reduction", waits=self._group.world_size > 1):
                if self._strategy.reduce_gradients(parameters, len(counts)):
                    self._strategy.divide_gradients(parameters, counts)
        except RuntimeError as error:
            raise self._group.explain(error, f"the gradients of step {number}") from error

    def _weighed(self, total: Tensor, factor: float, number: int) -> Tensor:
        if self.loss_scale is not None:  # in float32: a loss in float16 would overflow at once
            return total.float() * (factor * self.loss_scale.of(number))
        return total if factor == 1.0 else total * factor

    def _usable(self, entry: Entry, parameters: list[nn.Parameter], number: int) -> bool:
        """Returns whether to step at all, and scales the gradients of a scaled loss back.

        Reduced gradients are equal on all ranks, so that all of them skip, or none.
        """
        scale = self.loss_scale
        if scale is None:
            usable = not entry.skip_nan or self._strategy.gradients_are_finite(parameters)
            if not usable:
                self._aggregator.skipped(number)
            return usable
        usable = self._strategy.gradients_are_finite(parameters)
        used = scale.of(number)
        scale.noted(number, usable)
        if usable:
            multiply_gradients(parameters, torch.tensor(1.0 / used, device=parameters[0].device))
        else:
            self._aggregator.skipped(number, f"overflowed float16; the loss is scaled by {scale.next:g} from here on")
        return usable

    def _clip(
        self, entry: Entry, optimizer: Optimizer, parameters: list[nn.Parameter], number: int, may_divide: bool = True
    ) -> Tensor | None:
        """Clips gradients, and logs the norm that they had before.

        Returns what a fused optimizer divides gradients by, where that saves a pass over all of them.
        """
        divisor = None
        if self.before_step is not None:
            evaluations, self._evaluations = self._evaluations, None  # these gradients are finished
            self.before_step(optimizer)
            self._evaluations = evaluations
        if entry.clip_norm is not None and may_divide and divides_gradients(optimizer):
            norm = self._strategy.gradient_norm(parameters)
            divisor = torch.clamp((norm + 1e-6) / entry.clip_norm, min=1.0).float().to(parameters[0].device)
        elif entry.clip_norm is not None:
            norm = self._strategy.clip_gradients(parameters, entry.clip_norm)
        elif self._logs_norm:
            norm = self._strategy.gradient_norm(parameters)
        if self._logs_norm or (entry.clip_norm is not None and self._logs_norm is None):
            name = "gradient_norm" if len(self._models.optimizers) == 1 else f"gradient_norm/{entry.name}"
            # One value for all ranks: counted once, so that a resume on another number of ranks weighs it alike.
            self._aggregator.note(number, int(self._strategy.dp_rank == 0), {name: norm})
        return divisor

    def _note_learning_rate(self, entry: Entry, optimizer: Optimizer) -> None:
        """Notes the rates of this step: a scheduler may change them before the row is written."""
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
    return ConfigError(
        "train.activation_checkpointing: a module computed something else when it was run again in the backward "
        "pass. Modules that are recomputed must not keep anything from one call to the next: switch off a cache of "
        "keys and values (use_cache=False), or leave such modules out by a pattern. "
        f"{str(error).strip().splitlines()[0]}"
    )


def loss_and_count(loss: Any, count: Any = None) -> tuple[Tensor, Any]:
    """Returns a loss as a scalar and, where it is a sum, what it is a sum over."""
    if isinstance(loss, Mean):
        loss, count = loss.total, loss.count
    if not (count is None or isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise ConfigError(f"the count of a loss must be a single number, got {brief(repr(count), 60)}")
    if not isinstance(loss, Tensor):
        remedy = (
            "a number has no gradient, leave out .item()"
            if isinstance(loss, (int, float))
            else "return the one value to train on, and give the others to run.log or metrics()"
        )
        raise ConfigError(
            f"the loss must be a scalar tensor, the mean over the batch, or a lockstep.Mean; got a "
            f"{type(loss).__name__}: {remedy}"
        )
    if loss.dim() != 0:
        raise ConfigError(f"the loss must be a scalar, the mean over the batch; got shape {list(loss.shape)}")
    return loss, count


Closure = Callable[[], Any]


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step takes a closure that has no default: LBFGS, SAM."""
    return _requires_closure(type(optimizer).step)


@functools.cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Evaluations:
    """Evaluates a closure in one step of an optimizer, each time with loss and gradients of the global batch."""

    def __init__(
        self, strategy: Strategy, optimizer: Optimizer, parameters: list[nn.Parameter], clip: Callable[[], object]
    ) -> None:
        self._strategy, self._optimizer, self._parameters, self._clip = strategy, optimizer, parameters, clip
        self._losses: list[tuple[Tensor, float, Any]] = []
        self.count = 0

    def computed(self, total: Tensor, factor: float, count: Any) -> None:
        self._losses.append((total.detach(), factor, count))

    def evaluate(self, closure: Closure) -> Tensor:
        if self.count:
            self._strategy.stepped()  # the optimizer has changed the parameters since
        self._losses.clear()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            closure()
        self.count += 1
        return self._finish()

    def _finish(self) -> Tensor:
        counts = [count * factor for _, factor, count in self._losses if count is not None]
        if not self._losses or (counts and len(self._losses) > 1):
            raise ConfigError(
                f"run.step: the closure called run.backward {len(self._losses)} times. It must call it once, with the "
                "loss of the current batch"
            )
        self._strategy.reduce_gradients(self._parameters)
        if counts:
            self._strategy.divide_gradients(self._parameters, counts)
        self._clip()
        # Optimizers decide by the loss, so it must be that of the global batch, on all ranks.
        mean = self._strategy.mean_over_ranks([total * factor for total, factor, _ in self._losses], counts)
        return mean.to(self._losses[0][0].dtype)


def check_closure(entry: Entry, optimizer: Optimizer, step: Step, closure: Closure | None, scales_loss: bool) -> None:
    """Refuses a step without the closure that it needs, and what a closure cannot be combined with."""
    kind = type(optimizer).__name__
    if closure is None:
        if needs_closure(optimizer):
            raise ConfigError(
                f"run.step: {kind} computes the loss itself, and needs a function that does so. Give it one that calls "
                "the model and run.backward: run.step(optimizer, closure)"
            )
        return
    wrong = (
        "accumulate: it has the batch in parts. Set accumulate: 1" if step.is_part
        else "precision: fp16: it scales the loss. Use bf16 or float32" if scales_loss
        else "on_nan: skip. Set on_nan: stop" if entry.skip_nan
        else None
    )  # fmt: skip
    if wrong is not None:
        raise ConfigError(f"run.step: {kind} evaluates a closure on the whole batch, and cannot be used with {wrong}")


FIRST = 2.0**16
_GROWTH, _BACKOFF, _PATIENCE = 2.0, 0.5, 2000


class LossScale:
    """Scales the loss by a power of two, with the arithmetic and the numbers of torch's GradScaler.

    Whether gradients are finite is asked after they were reduced, so that all ranks answer alike; there is one scale
    for a step, however many optimizers it has.
    """

    def __init__(self) -> None:
        self._scale, self._good = FIRST, 0
        self._step = 0  # that the scale is used for
        self._overflowed: bool | None = None  # in that step; None before any of its optimizers has stepped

    def of(self, step: int) -> float:
        """Returns the factor for the losses of a step."""
        if step != self._step:
            self._scale, self._good = self._after()
            self._step, self._overflowed = step, None
        return self._scale

    def noted(self, step: int, finite: bool) -> None:
        """Notes whether the gradients of an optimizer were finite in a step."""
        self.of(step)
        self._overflowed = bool(self._overflowed) or not finite

    @property
    def next(self) -> float:
        """The factor of the step to come."""
        return self._after()[0]

    def _after(self) -> tuple[float, int]:
        if self._overflowed is None:
            return self._scale, self._good
        if self._overflowed:
            return self._scale * _BACKOFF, 0
        return (self._scale * _GROWTH, 0) if self._good + 1 == _PATIENCE else (self._scale, self._good + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "good": self._good, "step": self._step, "overflowed": self._overflowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale, self._good = float(state["scale"]), int(state["good"])
        self._step, self._overflowed = int(state["step"]), state["overflowed"]


def refuse_half_weights(dtypes: set[str]) -> None:
    if "torch.float16" in dtypes:
        raise ConfigError(
            "train.precision: fp16 computes in float16 and keeps weights in float32, but the model has parameters in "
            "float16: make it in float32 (no .half(), torch_dtype=torch.float32)"
        )
