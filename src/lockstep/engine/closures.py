"""Optimizers that compute the loss themselves, as often as they like: LBFGS, SAM."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.models import Entry
from lockstep.engine.step import Step
from lockstep.errors import ConfigError
from lockstep.strategy.base import Strategy

Closure = Callable[[], Any]


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step cannot be called without one."""
    return _requires_closure(type(optimizer).step)


@functools.cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Evaluations:
    """The evaluations of a closure in one step of an optimizer: each gives the loss and gradients of the global batch.

    A run.backward within the closure is reported to `computed`, and counts for its evaluation alone.
    """

    def __init__(
        self, strategy: Strategy, optimizer: Optimizer, parameters: list[nn.Parameter], clip: Callable[[], object]
    ) -> None:
        self._strategy, self._optimizer, self._parameters, self._clip = strategy, optimizer, parameters, clip
        self._losses: list[tuple[Tensor, float, Any]] = []
        self.count = 0

    def computed(self, total: Tensor, factor: float, count: Any) -> None:
        self._losses.append((total.detach(), factor, count))

    def evaluate(self, closure: Closure) -> Tensor:
        """Called by the optimizer in place of the closure."""
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


def check(entry: Entry, optimizer: Optimizer, step: Step, closure: Closure | None, scales_loss: bool) -> None:
    """Refuse a step without the closure that it needs, and what a closure cannot be combined with."""
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
