"""Methods of a model beside forward, where torch puts parameters together for forward alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method


def let_methods_compute(model: nn.Module) -> None:
    """Methods of the model beside forward put its parameters together, too; called from within forward they do not have
    to, and must not take them apart."""
    depth = [0]

    def begin(*about: Any) -> None:
        depth[0] += 1

    def end(*about: Any) -> None:
        depth[0] -= 1

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)
    for name, _ in inspect.getmembers(type(model), inspect.isfunction):
        if name.startswith("_") or hasattr(nn.Module, name) or hasattr(FSDPModule, name):
            continue
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, _Method(plain, getattr(model, name), depth))


class _Method:
    def __init__(self, plain: Callable[..., Any], together: Callable[..., Any], depth: list[int]) -> None:
        self._plain, self._together, self._depth = plain, together, depth
        functools.update_wrapper(self, plain)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._depth[0]:
            return self._plain(*inputs, **named)
        self._depth[0] += 1
        try:
            return self._together(*inputs, **named)
        finally:
            self._depth[0] -= 1
