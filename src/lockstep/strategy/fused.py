"""Optimizers that have a step in one kernel use it on GPUs, and clip gradients in the same pass over them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

logger = logging.getLogger(__name__)

# Of torch's optimizers those whose fused step works on GPUs.
_FUSED = (Adam, AdamW, SGD)
# How an optimizer computes its step: a setting of this process, not of what was trained so far.
_KERNELS = ("fused", "foreach")


def use_fused_step(optimizer: Optimizer, model: nn.Module, device: torch.device) -> bool:
    """Have an optimizer that nobody told otherwise step by its fused kernel; whether it does so from here on."""
    groups = optimizer.param_groups
    undecided = (
        type(optimizer) in _FUSED
        and all(group.get(name) is None for group in groups for name in _KERNELS)
        and not any(group.get("differentiable") for group in groups)
    )
    parameters = [each for group in groups for each in group["params"]]
    fits = all(each.device.type == device.type and each.is_floating_point() for each in parameters)
    if not undecided or not fits or _has_sparse_gradients(model):
        return False
    for group in groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    logger.info("optimizer: %s steps by one fused kernel; fused: false takes torch's own way", type(optimizer).__name__)
    return True


def with_own_kernels(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state with the way in which this process computes a step: the one it was saved on may have been a CPU."""
    groups = [
        {**saved, **{name: mine[name] for name in _KERNELS if name in mine}}
        for saved, mine in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**state, "param_groups": [*groups, *state["param_groups"][len(groups) :]]}


def divides_gradients(optimizer: Optimizer) -> bool:
    """Whether its step can divide gradients by a number on the way, as it does for scaled losses."""
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


@contextlib.contextmanager
def dividing(optimizer: Optimizer, divisor: Tensor | None) -> Iterator[None]:
    """Within, the optimizer's step divides gradients; None: it takes them as they are."""
    if divisor is None:
        yield
        return
    stepping: Any = optimizer
    stepping.grad_scale = divisor  # where torch's fused kernels look for it
    try:
        yield
    finally:
        del stepping.grad_scale


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(getattr(each, "sparse", False) for each in model.modules())
