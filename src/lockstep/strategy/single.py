"""The strategy of one device."""

from __future__ import annotations

from torch import nn

from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import to_device


class SingleStrategy(Strategy):
    name = "single"

    def place(self, model: nn.Module) -> nn.Module:
        return to_device(model, self.runtime.device)
