"""Strategies: how a model and its batches are spread over devices. One file each, chosen by name."""

from __future__ import annotations

from lockstep.config.load import check_strategy
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy
from lockstep.strategy.ddp import DdpStrategy


def create(
    settings: StrategySettings, runtime: Runtime, group: Group, leaves: int | None = None, seed: int = 0
) -> Strategy:
    """Returns the strategy that the config names; `auto` is `single` for one process and `ddp` for more.

    `leaves` is `train.exact`, whose random numbers depend on the seed.
    """
    check_strategy(settings, runtime.name, group.world_size)
    if leaves is None and settings.has_mesh and runtime.name != "xla":
        from lockstep.strategy.sharded import ShardedStrategy

        return ShardedStrategy(runtime, settings, group)
    strategy = _without_mesh(settings, runtime, group, leaves, seed)
    strategy.dp_rank = group.rank
    return strategy


def _without_mesh(
    settings: StrategySettings, runtime: Runtime, group: Group, leaves: int | None, seed: int
) -> Strategy:
    if leaves is not None:
        from lockstep.strategy.exact import ExactStrategy

        return ExactStrategy(runtime, group, leaves, seed)
    if runtime.name == "xla":
        return _on_xla(settings, runtime, group.world_size)
    if group.world_size == 1:
        return Strategy(runtime)
    return DdpStrategy(runtime, settings, group.world_size)


def _on_xla(settings: StrategySettings, runtime: Runtime, world_size: int) -> Strategy:
    from lockstep.runtime.xla import XlaRuntime
    from lockstep.strategy.spmd import SpmdStrategy
    from lockstep.strategy.threads import ThreadsStrategy
    from lockstep.strategy.xla_ddp import XlaDdpStrategy

    assert isinstance(runtime, XlaRuntime)
    if settings.has_mesh:
        return SpmdStrategy(runtime, settings, world_size)
    if settings.type == "threads":
        return ThreadsStrategy(runtime)
    if world_size == 1:
        return Strategy(runtime)
    return XlaDdpStrategy(runtime, settings, world_size)
