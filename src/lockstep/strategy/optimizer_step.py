"""How an optimizer steps: by one fused kernel on GPUs, and on a rank's own parts of sharded parameters.

Torch's optimizers take DTensors, and for every parameter ask what an operation means on a mesh; on a GPU that takes the
host several times as long as the step itself. For an optimizer that works on each number by itself it means nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.strategy import muon, whole_matrices
from lockstep.strategy.combined import CombinedOptimizer, parts_of
from lockstep.strategy.slices import from_part, is_spread, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

# Of torch's optimizers those whose fused step works on GPUs.
_FUSED = (Adam, AdamW, SGD)
# How an optimizer computes its step: a setting of this process, not of what was trained so far.
_KERNELS = ("fused", "foreach")

# Exactly these: what is derived from them may do anything.
BY_NUMBER = (
    optim.AdamW, optim.Adam, optim.SGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta, optim.Adamax,
    optim.NAdam, optim.RAdam, optim.ASGD,
)  # fmt: skip


def use_fused_step(optimizer: Optimizer, model: nn.Module, device: torch.device) -> bool:
    """Uses an optimizer's fused kernel where nobody decided otherwise; returns whether it does."""
    done = [_use_fused_step(part, model, device) for part in parts_of(optimizer)]
    return any(done)


def _use_fused_step(optimizer: Optimizer, model: nn.Module, device: torch.device) -> bool:
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
    """Returns a saved state with this process's kernels: the one it was saved on may have been a CPU."""
    groups = [
        {**saved, **{name: mine[name] for name in _KERNELS if name in mine}}
        for saved, mine in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**state, "param_groups": [*groups, *state["param_groups"][len(groups) :]]}


def divides_gradients(optimizer: Optimizer) -> bool:
    """Whether its step can divide gradients by a number, as it does for scaled losses."""
    if type(optimizer) not in _FUSED or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # Between devices (with strategy.offload, scalars stay on the GPU) torch would not wait for the number's copy.
    return len({each.device for group in optimizer.param_groups for each in group["params"]}) == 1


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


def meets(optimizer: Optimizer) -> bool:
    """Whether ranks wait for each other in its step."""
    return any(
        type(each) is optim.Muon or (whole_matrices.needs_whole(each) and _is_split(each))
        for each in parts_of(optimizer)
    )


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(getattr(each, "sparse", False) for each in model.modules())


def step_parts(optimizer: Optimizer) -> None:
    """Steps an optimizer on several ranks, by what it needs: numbers, whole matrices, or DTensors."""
    if isinstance(optimizer, CombinedOptimizer) and _is_watched(optimizer):
        optimizer.step()
        return
    for part in parts_of(optimizer):
        if type(part) is optim.Muon:
            muon.step(part)
        elif whole_matrices.needs_whole(part) and _is_split(part):
            whole_matrices.step(part)
        elif type(part) in BY_NUMBER and not _is_watched(part) and _is_split(part):
            with _on_parts(part):
                part.step()
        else:
            part.step()
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler of torch looks for it


def _is_split(optimizer: Optimizer) -> bool:
    return any(is_spread(each) for group in optimizer.param_groups for each in group["params"])


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether a hook would find parts where it expects parameters."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


@contextlib.contextmanager
def _on_parts(optimizer: Optimizer) -> Iterator[None]:
    """Replaces parameters, their gradients and their state by this rank's parts."""
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    parts: dict[Tensor, DTensor] = {}
    known: defaultdict[Tensor, Any] = defaultdict(dict)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [local_part(each) for each in parameters]
        for parameter, part in zip(parameters, group["params"], strict=True):
            if not is_spread(parameter):
                if part in state:
                    known[part] = state[part]
                continue
            parts[part] = parameter
            part.grad = None if parameter.grad is None else local_part(parameter.grad)
            if parameter in state:
                known[part] = {key: _part(value) for key, value in state[parameter].items()}
    optimizer.state = known
    try:
        yield
    finally:
        optimizer.state = state
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for part, learned in known.items():
            if part in parts:
                _bring_back(state[parts[part]], learned, parts[part])
            else:
                state[part] = learned
        for part in parts:
            part.grad = None


def _part(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _bring_back(state: dict[str, Any], learned: dict[str, Any], parameter: DTensor) -> None:
    """Most tensors were written in place; a new one of the part's shape becomes a DTensor."""
    for key, value in learned.items():
        if key in state and _part(state[key]) is value:
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter._local_tensor.shape:
            value = from_part(value, parameter)
        state[key] = value
