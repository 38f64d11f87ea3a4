"""Meshes and sharding rules as plain data, checked before any device is used."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lockstep.config.strategy import BATCH_AXES, AxisNames, Shape, ShardRule
from lockstep.config.strategy import DATA_AXIS as DATA_AXIS
from lockstep.config.strategy import MAIN as MAIN
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.config.strategy import resolve_meshes as resolve_meshes
from lockstep.errors import ConfigError

# Parameters with fewer elements are cheaper to keep whole than to gather.
LARGE = 1024


@dataclass(frozen=True)
class Sharding:
    """How one parameter is split: over which mesh, and which axes for every dimension."""

    mesh: str
    spec: tuple[AxisNames, ...]


@dataclass(frozen=True)
class Ruled:
    """The rule for one parameter."""

    pattern: str
    mesh: str
    rule: ShardRule


def shardings(
    parameters: Mapping[str, Sequence[int]],
    meshes: Mapping[str, Shape],
    settings: StrategySettings,
    rules: Mapping[str, ShardRule],
) -> dict[str, Sharding]:
    """Returns how parameters are split; those that neither a rule nor fsdp splits are kept whole."""
    ruled = by_rules(parameters, meshes, settings, rules)
    found = {name: Sharding(each.mesh, each.rule.spec) for name, each in ruled.items()}
    if settings.splits_all:
        for name, shape in parameters.items():
            spec = fully_sharded(shape, meshes[MAIN], found[name].spec if name in found else None)
            if spec is not None and found.get(name, Sharding(MAIN, ())).mesh == MAIN:
                found[name] = Sharding(MAIN, spec)
    return found


def by_rules(
    parameters: Mapping[str, Sequence[int]],
    meshes: Mapping[str, Shape],
    settings: StrategySettings,
    rules: Mapping[str, ShardRule],
) -> dict[str, Ruled]:
    """Returns the rule for each parameter that has one; a rule that matches none, or does not fit, is refused."""
    if settings.type == "tensor" and not rules:
        raise ConfigError("strategy: tensor splits by rules, and there are none: give strategy.shard")
    found: dict[str, Ruled] = {}
    for pattern, rule in rules.items():
        matching = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(_matches_nothing(pattern, list(parameters)))
        mesh = MAIN if rule.mesh is None else f"strategy.meshes.{rule.mesh}"
        if mesh not in meshes:
            raise ConfigError(
                f"strategy.shard.{pattern}: mesh {rule.mesh!r} is not declared; strategy.meshes has "
                f"{', '.join(name.rpartition('.')[2] for name in list(meshes)[1:]) or 'none'}"
            )
        for name in matching:
            if name not in found:
                _check(pattern, name, parameters[name], rule.spec, meshes[mesh])
                if settings.splits_all and mesh == MAIN:
                    _refuse_twice(pattern, name, rule.spec, settings.type)
                found[name] = Ruled(pattern, mesh, rule)
    return found


def with_rules_of_code(
    config: Mapping[str, ShardRule], code: Mapping[str, ShardRule], meshes: Mapping[str, Shape]
) -> dict[str, ShardRule]:
    """Returns the rules of a config, then those of the code whose axes the mesh has.

    Whoever writes a model says once how it can be split; whoever runs it says by the mesh how much of that is wanted.
    """

    def wanted(rule: ShardRule) -> bool:
        mesh = meshes.get(MAIN if rule.mesh is None else f"strategy.meshes.{rule.mesh}")
        return mesh is None or all(axis in mesh for entry in rule.spec for axis in axes_of(entry))

    return {**config, **{name: each for name, each in code.items() if name not in config and wanted(each)}}


def fully_sharded(
    shape: Sequence[int], mesh: Shape, spec: Sequence[AxisNames] | None = None
) -> tuple[AxisNames, ...] | None:
    """Splits a large parameter over the data axis along its longest dimension that divides; None to keep it as it is.

    `spec` is how a rule splits it already, over other axes: one of the dimensions that it leaves whole is taken.
    """
    size = mesh.get(DATA_AXIS, 1)
    spec = tuple(spec) if spec is not None else (None,) * len(shape)
    free = [dimension for dimension, entry in enumerate(spec) if not axes_of(entry)]
    fitting = [dimension for dimension in free if shape[dimension] % size == 0]
    if size == 1 or math.prod(shape) < LARGE or not fitting:
        return None
    chosen = max(fitting, key=lambda dimension: shape[dimension])
    return tuple(DATA_AXIS if dimension == chosen else entry for dimension, entry in enumerate(spec))


def batch_spec(dimensions: int, mesh: Shape) -> tuple[AxisNames, ...]:
    """Spreads examples over the data axis (and replicas); a mesh without one gives every device all of them."""
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh)
    first: AxisNames = axes if len(axes) > 1 else axes[0] if axes else None
    return (first, *[None] * (dimensions - 1))


def _refuse_twice(pattern: str, name: str, spec: Sequence[AxisNames], strategy: str) -> None:
    twice = [axis for entry in spec for axis in axes_of(entry) if axis in BATCH_AXES]
    if twice:
        raise ConfigError(
            f"strategy.shard.{pattern}: {spec_text(spec)} splits {name!r} over {twice[0]}, which strategy: {strategy} "
            f"does by itself: leave {twice[0]} out of the rule (null), or use strategy: tensor"
        )


def axes_of(entry: AxisNames) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _check(pattern: str, name: str, shape: Sequence[int], spec: Sequence[AxisNames], mesh: Shape) -> None:
    at, text = f"strategy.shard.{pattern}", spec_text(spec)
    if len(spec) != len(shape):
        raise ConfigError(
            f"{at}: {text} has {len(spec)} entries, but {name!r} has {len(shape)} dimensions {list(shape)}: give one "
            "entry per dimension (null where it is not split)"
        )
    used: list[str] = []
    for dimension, entry in enumerate(spec):
        for axis in axes_of(entry):
            if axis not in mesh:
                nearest = difflib.get_close_matches(axis, list(mesh), n=1, cutoff=0.5)
                advice = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(mesh)}"
                raise ConfigError(f"{at}: the mesh has no axis {axis!r}, {advice}")
            if axis in used:
                raise ConfigError(f"{at}: {text} uses the axis {axis!r} twice; an axis can split one dimension")
            used.append(axis)
        parts = math.prod(mesh[axis] for axis in axes_of(entry))
        if shape[dimension] % parts:
            raise ConfigError(
                f"{at}: dimension {dimension} of {name!r} {list(shape)} is {shape[dimension]}, which "
                f"{' x '.join(axes_of(entry))} ({parts} devices) does not divide"
            )


def _matches_nothing(pattern: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return (
        f"strategy.shard.{pattern}: no parameter has a name like that; the nearest are {', '.join(nearest)} "
        "(patterns are matched as file names are: * stands for anything)"
    )


def spec_text(spec: Sequence[AxisNames]) -> str:
    return "[" + ", ".join("null" if each is None else str(each) for each in spec) + "]"


def shard_rules(rules: Mapping[str, Any]) -> dict[str, ShardRule]:
    """Parses rules: axis names per dimension, or a mapping with a spec and a mesh, by parameter-name pattern."""
    checked = {}
    for pattern, rule in rules.items():
        try:
            checked[pattern] = ShardRule.model_validate({"spec": rule} if isinstance(rule, list | tuple) else rule)
        except ValidationError as problems:
            raise ConfigError(
                f"shard_rules: {pattern!r}: {problems.errors()[0]['msg']}, got {rule!r}: give an axis name (or None) "
                "for every dimension of the parameter"
            ) from None
    return checked
