"""Muon on several ranks: one rank computes each matrix, and the numbers are those of torch.optim.Muon.

Momentum and the change of the weights work on each number by itself, so every rank does them on its own part. What
needs a whole matrix is to make the update orthogonal. Its parts travel to the rank that does that, and back, in
bfloat16, in which torch computes it anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from lockstep.strategy.slices import from_part, is_spread, local_part
from lockstep.strategy.whole_matrices import plan_of

_DTYPE = torch.bfloat16  # in which torch makes an update orthogonal
_ROUND_BYTES = 256 * 2**20  # that a rank receives at once


def _step(optimizer: Optimizer) -> None:
    """Steps a torch.optim.Muon; all ranks take part, each with its parts of the same parameters."""
    todo = [(group, each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    matrices = plan_of(optimizer, [each for _, each in todo], _DTYPE, _ROUND_BYTES)
    for numbers in matrices.rounds:
        wholes = matrices.gather({number: _update(optimizer, *todo[number]) for number in numbers})
        for number, whole in wholes.items():
            group = todo[number][0]
            made = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
            wholes[number] = made
        for number, part in matrices.scatter(wholes, numbers).items():
            group, parameter = todo[number]
            rate = float(group["lr"])
            mine = local_part(parameter)
            mine.mul_(1 - rate * group["weight_decay"])
            mine.add_(part.to(mine.device), alpha=-_adjust_lr(rate, group["adjust_lr_fn"], parameter.shape))


# With the hooks of an optimizer's step, as torch calls them.
step = torch.no_grad()(Optimizer.profile_hook_step(_step))


def _update(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Returns this rank's part of the update before it is made orthogonal."""
    gradient = local_part(parameter.grad)  # type: ignore[arg-type]
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        zeros = torch.zeros_like(gradient)
        state["momentum_buffer"] = from_part(zeros, parameter) if is_spread(parameter) else zeros
    momentum = local_part(state["momentum_buffer"])
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    return update.to(_DTYPE, copy=True)  # torch divides it in place
