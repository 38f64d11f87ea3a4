"""Tensors that stand for values nobody has: torch_xla notes what is computed from them, and they take no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.planner.tpu.shardings import REPLICATED


@dataclass
class Known:
    """What an argument of the program is."""

    kind: str
    name: str
    sharding: str
    shape: list[int]
    dtype: str
    number: int  # that torch_xla has for it


class Register:
    """Every placeholder that was made, by the number that torch_xla has for it."""

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_builder as builder

        self._xla, self._builder = torch_xla._XLAC, builder
        self.known: dict[int, Known] = {}
        self.last = -1  # the number of the one that was made last

    def new(self, shape: Any, dtype: torch.dtype, kind: str, name: str, sharding: str = REPLICATED) -> Tensor:
        # A TPU has no integers of 64 bits, and libtpu 0.0.21 ends in a crash where an embedding is given such.
        narrow = torch.int32 if dtype == torch.int64 else torch.float32 if dtype == torch.float64 else dtype
        base: Tensor = self._builder.create_placeholder_tensor(list(shape), narrow)
        base.clone()  # from here on it is an argument, and all that is made of it has its number
        number = int(self._xla._xla_get_tensor_id(base))  # asked now: what is written to gets another
        self.known[number] = Known(kind, name, sharding, list(shape), str(narrow).removeprefix("torch."), number)
        self.last = number
        return base if base.dtype == dtype else base.to(dtype)


def swap(model: nn.Module, make: Any) -> list[tuple[Tensor, Tensor]]:
    """Placeholders for all parameters and buffers; those that were shared are shared. What took the place of what."""
    instead: dict[int, Tensor] = {}
    replaced: list[tuple[Tensor, Tensor]] = []
    for prefix, module in model.named_modules():
        for own, buffers in ((module._parameters, False), (module._buffers, True)):
            for name, value in list(own.items()):
                if value is None:
                    continue
                if id(value) not in instead:
                    made = make(f"{prefix}.{name}" if prefix else name, value)
                    if not buffers:
                        made = nn.Parameter(made, requires_grad=value.requires_grad)
                        replaced.append((value, made))
                    instead[id(value)] = made
                own[name] = instead[id(value)]
    return replaced
