"""Models that a user's function splits (Task.parallelize): what it was given, and what it must leave."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config.strategy import ShardRule
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.errors import ConfigError
from lockstep.strategy.placing import Parallelize
from lockstep.strategy.slices import is_spread

_WRAPPER = "_checkpoint_wrapped_module."


def name_of(function: Parallelize) -> str:
    return str(getattr(function, "__qualname__", "parallelize"))


def refuse_settings(settings: StrategySettings, rules: Mapping[str, ShardRule]) -> None:
    """Refuses settings that say how Lockstep splits a model."""
    given = ["shard"] * bool(settings.shard or rules) + ["offload"] * settings.offload + settings.given_for_blocks
    for name in given:
        raise ConfigError(
            f"strategy.{name} is about how Lockstep splits a model, but this one is split by a parallelize: do it "
            "there (fully_shard has offload_policy and mp_policy), and remove the setting"
        )


def apply(function: Parallelize, model: nn.Module, mesh: DeviceMesh) -> None:
    placed = function(model, mesh)
    if placed is not None and placed is not model:
        raise ConfigError(
            f"{name_of(function)} returned another module ({type(placed).__name__}): change the model in place, with "
            "fully_shard rather than a wrapper, and return it or nothing"
        )
    _keep_names(model)


def _keep_names(model: nn.Module) -> None:
    """Gives parameters the names that they have in the state, which torch's checkpoint_wrapper is not part of."""
    plain = model.named_parameters

    def named(*arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, each in plain(*arguments, **options):
            yield name.replace(_WRAPPER, ""), each

    if any(_WRAPPER in name for name, _ in plain()):
        model.named_parameters = named  # type: ignore[method-assign]


def check(
    function: Parallelize, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], over: Collection[int]
) -> None:
    """Refuses what could be neither averaged nor saved; `over` are the ranks that gradients are averaged over."""
    now, who = dict(model.named_parameters()), name_of(function)
    for name in sorted(shapes.keys() ^ now.keys()):
        raise ConfigError(
            f"{who}: {name} is {'a new name' if name in now else 'gone'}, but checkpoints go by names: use "
            "module.compile() in place of torch.compile, and keep weights tied"
        )
    for name, each in now.items():
        if tuple(each.shape) != shapes[name]:
            raise ConfigError(
                f"{who}: {name} has the shape {tuple(each.shape)} in place of {shapes[name]}: a part must be a DTensor "
                "(distribute_tensor, parallelize_module), which knows where it belongs"
            )
        if is_spread(each) and not set(over) <= set(each.device_mesh.mesh.flatten().tolist()):
            raise ConfigError(
                f"{who}: {name} is on a mesh without the data axis ({each.device_mesh}), so that its gradient would be "
                "that of one rank: put it under fully_shard, too"
            )
