"""What Lockstep asks of a way of spreading a model and its batches."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.schema import ShardRule
from lockstep.runtime.base import Runtime


class Strategy(abc.ABC):
    """Places a model, and says when gradients travel. The bare module stays reachable for saving and evaluating."""

    name: ClassVar[str]

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def parts(self) -> int:
        """Devices of this process that take a part of its batch each, one after the other."""
        return 1

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The device meshes, by name, where there are any."""
        return {}

    def use_rules(self, rules: Mapping[str, ShardRule]) -> None:  # noqa: B027
        """The sharding rules of the task; those of the config come before them."""

    @abc.abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """The module to train with; its parameters are on the device and equal on all ranks."""

    def move(self, batch: Any) -> Any:
        """A batch on the device that is to work on it."""
        return self.runtime.move(batch)

    def computed(self, last: bool) -> None:
        """The gradients of a part of the batch are there; with `last`, those of all of it."""
        if not last:  # what follows is a program of its own, the same for every part
            self.runtime.end_of_program()

    def reduce_gradients(self, model: nn.Module) -> None:  # noqa: B027
        """Make the gradients those of the whole batch, where the backward pass has not done so."""

    def stepped(self, model: nn.Module) -> None:
        """The optimizer has changed the parameters: here the step ends."""
        self.runtime.end_of_program()

    def restored(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Weights and optimizer state were read back."""
        self.runtime.end_of_program()

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """What must be equal on all ranks between two steps."""
        return {}

    @abc.abstractmethod
    def sync_gradients(self, wanted: bool) -> None:
        """Whether the next forward and backward pass exchanges gradients (not for all but the last part of a batch)."""

    @abc.abstractmethod
    def equalize_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (running statistics), before they are evaluated or saved."""


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model so that its parameters stay the same objects: an optimizer that was made before still has them.

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
