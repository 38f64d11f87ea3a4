"""An optimizer's step on a rank's own parts of the parameters, as the plain tensors that they are.

Torch's optimizers take DTensors, and for every parameter ask what an operation means on a mesh; on a GPU that takes the
host several times as long as the step itself. For an optimizer that works on each number by itself it means nothing.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.strategy.slices import local_part

# Exactly these: what is derived from them may do anything.
BY_NUMBER = (
    optim.AdamW, optim.Adam, optim.SGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta, optim.Adamax,
    optim.NAdam, optim.RAdam, optim.ASGD,
)  # fmt: skip


def step(optimizer: Optimizer) -> None:
    if type(optimizer) not in BY_NUMBER or _is_watched(optimizer):
        optimizer.step()
        return
    with _on_parts(optimizer):
        optimizer.step()


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether somebody's hook would find parts where it knows parameters."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


@contextlib.contextmanager
def _on_parts(optimizer: Optimizer) -> Iterator[None]:
    """Parts take the place of parameters, of their gradients and of what the optimizer knows of them."""
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    parts: dict[Tensor, Tensor] = {}
    known: defaultdict[Tensor, Any] = defaultdict(dict)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [local_part(each) for each in parameters]
        for parameter, part in zip(parameters, group["params"], strict=True):
            if part is parameter:
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


def _bring_back(state: dict[str, Any], learned: dict[str, Any], parameter: Tensor) -> None:
    """Most tensors were written in place; what is new belongs to a part, where it has the part's form."""
    assert isinstance(parameter, DTensor)
    for key, value in learned.items():
        if key in state and _part(state[key]) is value:
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter._local_tensor.shape:
            value = DTensor.from_local(
                value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        state[key] = value
