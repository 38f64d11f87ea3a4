"""One process, one device: nothing to spread."""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.strategy.base import Modules, Strategy, named_parameters, to_device


class SingleStrategy(Strategy):
    name = "single"

    def place(self, model: nn.Module) -> nn.Module:
        return to_device(model, self.runtime.device)

    def parameters_to_check(self, modules: Modules) -> dict[str, Tensor]:
        named = named_parameters(modules)
        return dict(zip(named, self.runtime.fetch(list(named.values())), strict=True))
