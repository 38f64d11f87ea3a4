"""The strategy of one device."""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Modules, on_host, to_device


class SingleStrategy(Strategy):
    name = "single"

    def place(self, model: nn.Module) -> nn.Module:
        return to_device(model, self.runtime.device)

    def parameters_to_check(self, modules: Modules) -> dict[str, Tensor]:
        return on_host(modules, self.runtime.fetch)
