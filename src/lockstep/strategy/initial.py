"""First weights of a model that was made without memory: module by module, so that it is never whole anywhere.

A model that is made under `torch.device("meta")` has shapes and no values. Each of its modules is then initialised by
itself, from a seed of its own: the same numbers on any number of ranks and in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError

Initialise = Callable[[nn.Module], object]

_STREAM = 4  # of random numbers; data/order.py and data/loader.py have the others


def has_no_memory(model: nn.Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def initialise(model: nn.Module, seed: int, by: Initialise | None = None) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give values to every parameter and buffer that has none, on the host; what took the place of which parameter."""
    replaced = []
    for name, module in model.named_modules():
        replaced += initialise_module(model, name, module, seed, by)
    return replaced


def initialise_module(
    model: nn.Module, name: str, module: nn.Module, seed: int, by: Initialise | None = None
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give values to what this module itself has; what others have as well (tied weights) is given to them, too."""
    own = [(key, each) for key, each in module.named_parameters(recurse=False) if each.is_meta]
    replaced = []
    for _, parameter in own:
        fresh = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
        _replace(model.modules(), parameter, fresh)
        replaced.append((parameter, fresh))
    hollow = [key for key, each in module.named_buffers(recurse=False) if each.is_meta]
    for key in hollow:
        module._buffers[key] = torch.empty_like(module._buffers[key], device="cpu").fill_(_UNSET)  # type: ignore[arg-type]
    if not own and not hollow:
        return replaced
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(name, seed))
        with torch.no_grad():
            _fill(name, module, [key for key, _ in own] + hollow, by)
    return replaced


# What a buffer holds until something sets it: any number would do that nobody takes for a result.
_UNSET = 0


def _fill(name: str, module: nn.Module, missing: list[str], by: Initialise | None) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if by is not None:
        by(module)
    elif callable(reset):
        reset()
    else:
        raise ConfigError(
            f"{name + '.' if name else ''}{missing[0]}: the model was made on the meta device, and "
            f"{type(module).__name__} does not say how it is initialised: give it a method reset_parameters(), or the "
            "task a method init_weights(module) (in a loop of your own: run.setup(..., init_weights=...))"
        )


def _replace(modules: Iterable[nn.Module], old: nn.Parameter, fresh: nn.Parameter) -> None:
    for module in modules:
        for key, each in module._parameters.items():
            if each is old:
                module._parameters[key] = fresh


def _seed_of(name: str, seed: int) -> int:
    words = np.random.SeedSequence([_STREAM, seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def tensors_without_memory(module: nn.Module) -> dict[str, Tensor]:
    """Plain attributes of a module that are tensors without values: no parameter, no buffer, and used all the same."""
    return {key: each for key, each in vars(module).items() if isinstance(each, Tensor) and each.is_meta}
