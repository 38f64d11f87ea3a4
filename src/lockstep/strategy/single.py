"""One process, one device: nothing to spread."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from lockstep.strategy.base import Strategy, to_device


class SingleStrategy(Strategy):
    name: ClassVar[str] = "single"

    def place(self, model: nn.Module) -> nn.Module:
        return to_device(model, self.runtime.device)

    def sync_gradients(self, wanted: bool) -> None:
        pass

    def equalize_buffers(self, model: nn.Module) -> None:
        pass
