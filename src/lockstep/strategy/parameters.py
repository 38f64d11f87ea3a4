"""Parameters by name, their gradients, and moving them to a device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.strategy.slices import local_part

Modules = Mapping[str, nn.Module]
Parameters = Sequence[nn.Parameter]


def require_memory(optimizer: Optimizer, state: Tensor) -> None:
    """Refuses an optimizer that made state of parameters on the meta device."""
    if state.is_meta:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} makes its state of the parameters it is given, and those of a "
            "model on the meta device have no values yet: use one that makes it in its first step (AdamW, Adam, SGD)"
        )


def give_new_parameters(optimizer: Optimizer, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Gives an optimizer the parameters that replaced its own, with their state."""
    now = {id(before): after for before, after in replaced}
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(each), each) for each in group["params"]]
    for before in [each for each in optimizer.state if id(each) in now]:
        optimizer.state[now[id(before)]] = optimizer.state.pop(before)


def move_state(optimizer: Optimizer) -> None:
    """Moves state that an optimizer made before its model was placed (Adagrad) to where the parameters are now."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device != parameter.device:
                require_memory(optimizer, value)
                state[name] = value.to(parameter.device)


def named_parameters(modules: Modules) -> dict[str, Tensor]:
    """Returns parameters as `fc.weight`, or `generator.fc.weight` where there is more than one model."""
    return {
        prefixed(modules, name, parameter_name): parameter
        for name, module in modules.items()
        for parameter_name, parameter in module.named_parameters()
    }


def prefixed(modules: Modules, module: str, name: str) -> str:
    return name if len(modules) == 1 else f"{module}.{name}"


@contextlib.contextmanager
def without_gradients(models: Iterable[nn.Module]) -> Iterator[None]:
    trained = [each for model in models for each in model.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def gradients_of(parameters: Parameters) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def multiply_gradients(parameters: Parameters, factor: Tensor) -> None:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in (local_part(each) for each in gradients_of(parameters)):
        if gradient.is_sparse:
            gradient.mul_(factor.to(gradient.dtype))
        else:
            kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), gradients in kinds.items():
        # In float32 at least: rounded to bfloat16, one factor would make all of them too large or too small.
        wide = factor.to(device, torch.promote_types(dtype, torch.float32))
        if wide.dtype == dtype:
            torch._foreach_mul_(gradients, wide)  # all at once: a kernel for each would cost more
        else:  # with the dimensions of the gradient: types are promoted only among tensors of one kind
            torch._foreach_mul_(gradients, [wide.view((1,) * each.dim()) for each in gradients])


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns whether all numbers are finite, by the largest of each tensor: a kernel or two for all of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        if each.numel():
            kinds.setdefault((each.dtype, each.device), []).append(each)
    largest = [torch.stack(list(torch._foreach_norm(each, math.inf))) for each in kinds.values()]
    found = [each.isfinite().all().to(device) for each in largest]
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves a model; its parameters stay the same objects, for an optimizer that was made before.

    For most devices `.to()` does that by itself; for XLA it makes new parameters, and unties those that are shared.
    """
    if device.type != "xla":
        return model.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def values_of(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
