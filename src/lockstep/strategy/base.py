"""What Lockstep asks of a way of spreading a model and its batches."""

from __future__ import annotations

import abc
from typing import ClassVar

from torch import Tensor, nn

from lockstep.runtime.base import Runtime


class Strategy(abc.ABC):
    """Places a model, and says when gradients travel. The bare module stays reachable for saving and evaluating."""

    name: ClassVar[str]

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @abc.abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """The module to train with; its parameters are on the device and equal on all ranks."""

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        """What must be equal on all ranks between two steps."""
        return {}

    @abc.abstractmethod
    def sync_gradients(self, wanted: bool) -> None:
        """Whether the next forward and backward pass exchanges gradients (not for all but the last part of a batch)."""

    @abc.abstractmethod
    def equalize_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (running statistics), before they are evaluated or saved."""
