"""Meshes and sharding rules as plain data: what fits what, worked out before any device is asked."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.mesh import DATA_AXIS as DATA_AXIS
from lockstep.config.mesh import MAIN as MAIN
from lockstep.config.mesh import Shape
from lockstep.config.mesh import resolve_meshes as resolve_meshes
from lockstep.config.schema import AxisNames, ShardRule
from lockstep.config.schema import Strategy as StrategySettings
from lockstep.errors import ConfigError

# Parameters with fewer elements are cheaper to keep whole than to gather.
LARGE = 1024


@dataclass(frozen=True)
class Sharding:
    """How one parameter is split: over which mesh, and which axes for every dimension."""

    mesh: str
    spec: tuple[AxisNames, ...]


def shardings(
    parameters: Mapping[str, Sequence[int]],
    meshes: Mapping[str, Shape],
    settings: StrategySettings,
    rules: Mapping[str, ShardRule],
) -> dict[str, Sharding]:
    """How every parameter is split, by its shape; those that no rule and no preset speaks of are kept whole."""
    if settings.preset == "tensor" and not rules:
        raise ConfigError("strategy.preset: tensor splits by rules, and there are none: give strategy.shard")
    found: dict[str, Sharding] = {}
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
                found[name] = Sharding(mesh, rule.spec)
    if settings.preset == "fsdp":
        for name, shape in parameters.items():
            spec = fully_sharded(shape, meshes[MAIN])
            if name not in found and spec is not None:
                found[name] = Sharding(MAIN, spec)
    return found


def fully_sharded(shape: Sequence[int], mesh: Shape) -> tuple[AxisNames, ...] | None:
    """A large parameter split over the data axis along its longest dimension that divides; None to keep it whole."""
    size = mesh.get(DATA_AXIS, 1)
    fitting = [dimension for dimension, length in enumerate(shape) if length % size == 0]
    if size == 1 or math.prod(shape) < LARGE or not fitting:
        return None
    chosen = max(fitting, key=lambda dimension: shape[dimension])
    return tuple(DATA_AXIS if dimension == chosen else None for dimension in range(len(shape)))


def batch_spec(dimensions: int, mesh: Shape) -> tuple[AxisNames, ...]:
    """Examples are spread over the data axis; a mesh without one gives every device all of them."""
    axis = DATA_AXIS if DATA_AXIS in mesh else None
    return (axis, *[None] * (dimensions - 1))


def _axes(entry: AxisNames) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _check(pattern: str, name: str, shape: Sequence[int], spec: Sequence[AxisNames], mesh: Shape) -> None:
    at, text = f"strategy.shard.{pattern}", _text(spec)
    if len(spec) != len(shape):
        raise ConfigError(
            f"{at}: {text} has {len(spec)} entries, but {name!r} has {len(shape)} dimensions {list(shape)}: give one "
            "entry per dimension (null where it is not split)"
        )
    used: list[str] = []
    for dimension, entry in enumerate(spec):
        for axis in _axes(entry):
            if axis not in mesh:
                nearest = difflib.get_close_matches(axis, list(mesh), n=1, cutoff=0.5)
                advice = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(mesh)}"
                raise ConfigError(f"{at}: the mesh has no axis {axis!r}, {advice}")
            if axis in used:
                raise ConfigError(f"{at}: {text} uses the axis {axis!r} twice; an axis can split one dimension")
            used.append(axis)
        parts = math.prod(mesh[axis] for axis in _axes(entry))
        if shape[dimension] % parts:
            raise ConfigError(
                f"{at}: dimension {dimension} of {name!r} {list(shape)} is {shape[dimension]}, which "
                f"{' x '.join(_axes(entry))} ({parts} devices) does not divide"
            )


def _matches_nothing(pattern: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return (
        f"strategy.shard.{pattern}: no parameter has a name like that; the nearest are {', '.join(nearest)} "
        "(patterns are matched as file names are: * stands for anything)"
    )


def _text(spec: Sequence[AxisNames]) -> str:
    return "[" + ", ".join("null" if each is None else str(each) for each in spec) + "]"
