"""Which block of a model that is spread over ranks a rank is at, and whether it computes there or waits for the others.

Ranks meet before a block computes, in either pass, to put its parameters together, and after its backward pass, to
bring its gradients together. All of that is torch's own, in hooks; ours are put before and behind those, and say so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.activity import Activity, Moment

_MODEL = "the model"


class Whereabouts:
    """Notes where a rank is in one unit: a block, or what is outside of all blocks, which has no name."""

    def __init__(self, activity: Activity, name: str) -> None:
        self._activity, self._is_model = activity, not name
        shown = name or _MODEL
        self._gathers = self._note(f"the parameters of {shown}", waits=True)
        self._computes = self._note(f"the forward pass of {shown}")
        self._goes_back = self._note(f"the backward pass of {shown}")
        self._reduces = self._note(f"the gradients of {shown}", waits=True)
        self._is_between = self._note(f"the backward pass of {_MODEL}", unless_left=f"the gradients of {shown}")
        self._before: list[Moment] = []  # what it did as it came to the unit

    def before_split(self, unit: nn.Module) -> None:
        """Hooks of torch's that come later do what is to be noted here."""
        unit.register_forward_hook(self._computed)

    def after_split(self, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(self._gathered, with_kwargs=True)
        unit.register_forward_hook(self._leave, always_call=True)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _enter(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        self._before.append(self._activity.now)
        self._gathers()
        _when_differentiated((inputs, named), self._is_between)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _gathered(self, unit: nn.Module, inputs: Any, named: Any) -> None:
        self._computes()
        _when_differentiated((inputs, named), self._reduces)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _computed(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        _when_differentiated(output, self._comes_back)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _leave(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        before = self._before.pop()
        if output is None and sys.exc_info()[0] is not None:
            return  # it failed, and where it did says why
        _when_differentiated(output, self._goes_back)
        self._activity.go_back(before)

    def _comes_back(self) -> None:
        if self._is_model:  # its inputs have no gradient: what is left to be brought together is when all else is done
            torch.autograd.Variable._execution_engine.queue_callback(self._reduces)
        self._gathers()

    def _note(self, doing: str, waits: bool = False, unless_left: str | None = None) -> Callable[[], None]:
        """What notes this; not where the rank has gone on already, to the block whose output is the input of this."""

        def note() -> None:
            if unless_left is not None and self._activity.now.doing != unless_left:
                return
            # More time where torch is compiling; none without end, as for a loop of which nothing is known.
            limit = self._activity.now.limit
            self._activity.enter(doing, waits=waits, limit=limit if limit < math.inf else 0.0)

        return note


def _when_differentiated(values: Any, note: Callable[[], None]) -> None:
    if not torch.is_grad_enabled():
        return
    for each in _tensors(values):
        if each.grad_fn is not None:  # what is no result of anything would keep the hook for ever
            each.register_hook(lambda gradient: note())  # type: ignore[no-untyped-call]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from _tensors(each)
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from _tensors(each)
