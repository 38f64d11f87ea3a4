"""Outputs of a module that is put together and taken apart, without views among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.runtime.moving import map_tensors


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
