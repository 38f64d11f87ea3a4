"""Something put around the forward pass of modules, which stay what they are: the same objects under the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.runtime.moving import map_tensors

Forward = Callable[..., Any]  # with the module as its first argument


def wrap_forward(modules: Iterable[nn.Module], wrap: Callable[[Forward], Forward]) -> None:
    """Let `wrap` make a new forward function, once for all modules of a class.

    Hooks of a module stay outside of it. It is a method of the module, so that a deep copy calls its own.
    """
    made: dict[Forward, Forward] = {}
    for module in modules:
        forward = _forward_of(module)
        if forward not in made:
            made[forward] = wrap(forward)
        module.forward = MethodType(made[forward], module)


def _forward_of(module: nn.Module) -> Forward:
    own = vars(module).get("forward")  # where somebody has put something around it before
    if own is None:
        return type(module).forward
    if inspect.ismethod(own) and own.__self__ is module:
        return own.__func__
    return lambda _, *inputs, **keywords: own(*inputs, **keywords)


def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Torch loses its hook where a view is changed in place; and what a split layer gives is a view of a DTensor."""
    return map_tensors(lambda each: _own(each) if each._is_view() else each, output)


def _own(tensor: Tensor) -> Tensor:
    own: Tensor = _NoView.apply(tensor)  # type: ignore[no-untyped-call]
    return own


class _NoView(torch.autograd.Function):
    """The same memory as a tensor of its own: a copy of the logits may be what a device has no room for."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
