"""Ways of spreading a model: one file each, chosen by name."""

from __future__ import annotations

from lockstep.config.load import check_strategy
from lockstep.config.schema import Strategy as StrategySettings
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy
from lockstep.strategy.ddp import DdpStrategy
from lockstep.strategy.single import SingleStrategy


def create(settings: StrategySettings, runtime: Runtime, world_size: int) -> Strategy:
    """The strategy that the config names; `auto` is `single` for one process and `ddp` for more."""
    check_strategy(settings.type, world_size)
    if world_size == 1:
        return SingleStrategy(runtime)
    return DdpStrategy(runtime, settings)
