"""Saved state into models and optimizers whose tensors are spread over ranks: each rank reads its own parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategy.slices import Slice, Stored, is_spread, slice_of


def load_module(module: nn.Module, stored: Mapping[str, Any], strict: bool = True) -> None:
    """Like module.load_state_dict, which also finds out what does not fit; raises its RuntimeError.

    Spread tensors that fit are given to it as they are, and their values are read straight into place after it.
    """
    own = module.state_dict()
    spread = {
        name
        for name, value in stored.items()
        if isinstance(value, (Tensor, Stored))
        and is_spread(mine := own.get(name))
        and tuple(value.shape) == tuple(mine.shape)
    }
    module.load_state_dict(
        {name: own[name] if name in spread else _told(value, own.get(name)) for name, value in stored.items()},
        strict=strict,
    )
    # Asked for again: after loading, torch may have given a part that it pads other memory.
    parts = {name: part for name, each in module.state_dict().items() if name in spread and (part := slice_of(each))}
    filled: set[tuple[int, torch.Size]] = set()
    for name, part in parts.items():
        place = (part.tensor.data_ptr(), part.tensor.shape)
        if part.tensor.numel() and place not in filled:  # tied weights are read once
            filled.add(place)
            value = stored[name]
            if isinstance(value, Stored):
                value.fill(part.tensor, part.offset)
            else:
                with torch.no_grad():
                    part.tensor.copy_(_read(value, part))


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Like optimizer.load_state_dict. What is as large as its parameter is spread like it; all else is whole."""
    saved_groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    parameters = {
        number: parameter
        for saved, group in zip(
            saved_groups, optimizer.param_groups, strict=False
        )  # torch itself refuses other numbers
        for number, parameter in zip(saved["params"], group["params"], strict=False)
    }
    optimizer.load_state_dict(
        {
            **{key: read_like(value, None) for key, value in state.items() if key != "state"},
            "state": {
                number: {
                    name: read_like(value, None if name == "step" else parameters.get(number))
                    for name, value in entry.items()
                }
                for number, entry in state["state"].items()
            },
        }
    )


def read_like(value: Any, like: Any) -> Any:
    """What is stored, in the form of `like`: spread where that is and has the same shape; whole elsewhere.

    Inside of mappings and lists each entry is compared with its counterpart, if `like` has one.
    """
    if type(value) is dict:
        return {
            key: read_like(each, like.get(key) if isinstance(like, Mapping) else like) for key, each in value.items()
        }
    if type(value) in (list, tuple):
        alike = like if isinstance(like, (list, tuple)) and len(like) == len(value) else [like] * len(value)
        return type(value)(read_like(each, other) for each, other in zip(value, alike, strict=True))
    if not isinstance(value, (Stored, Tensor)):
        return value
    if not is_spread(like) or tuple(value.shape) != tuple(like.shape):
        return value.whole() if isinstance(value, Stored) else value
    part = slice_of(like)
    assert part is not None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        _read(value, part).to(part.tensor.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _read(value: Tensor | Stored, part: Slice) -> Tensor:
    size = tuple(part.tensor.shape)
    if isinstance(value, Stored):
        return value.part(part.offset, size)
    return value[tuple(slice(begin, begin + count) for begin, count in zip(part.offset, size, strict=True))].clone()


def _told(value: Any, mine: Any) -> Any:
    """What load_state_dict gets to see of a value that is not read straight into place.

    Where it does not fit, its shape is enough to be refused by.
    """
    if isinstance(value, Stored):
        fits = isinstance(mine, Tensor) and tuple(mine.shape) == value.shape
        return value.whole() if fits else torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
