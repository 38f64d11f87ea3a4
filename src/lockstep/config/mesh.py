"""The meshes that a config declares, with their sizes: worked out without asking any device, or importing torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.strategy import Strategy

MAIN = "strategy.mesh"
DATA_AXIS, REPLICA_AXIS = "data", "replica"
BATCH_AXES = (REPLICA_AXIS, DATA_AXIS)  # that batches are spread over, in this order

Shape = Mapping[str, int]


def resolve_meshes(settings: Strategy, devices: int, remedy: str = "devices") -> dict[str, dict[str, int]]:
    """Every mesh with its sizes known, the main one first; each has to use exactly the devices that there are.

    `remedy` is what else a user can change, where that is not the number of devices.
    """
    shapes = {MAIN: settings.mesh or {DATA_AXIS: -1}}
    shapes |= {f"strategy.meshes.{name}": shape for name, shape in settings.meshes.items()}
    resolved = {name: _resolved(name, shape, devices, remedy) for name, shape in shapes.items()}
    _check_axes(settings.type, resolved[MAIN])
    return resolved


def dp_size(shape: Shape) -> int:
    """Into how many shares a mesh divides a batch: one for every place along the axes that batches are spread over."""
    return math.prod(shape.get(axis, 1) for axis in BATCH_AXES)


def spans_processes(settings: Strategy, runtime: str) -> bool:
    """Whether the mesh is one of processes: XLA has its own devices to make one of."""
    return settings.has_mesh and runtime in ("cpu", "cuda")


def batch_shares(settings: Strategy, runtime: str, processes: int) -> int:
    """Into how many shares a batch is divided: one per process, unless a mesh has several work on one together."""
    if not spans_processes(settings, runtime):
        return processes
    return dp_size(resolve_meshes(settings, processes, "processes")[MAIN])


def processes_of(settings: Strategy) -> int | None:
    """How many processes a mesh asks for by itself; None where it takes what there are."""
    sizes = list((settings.mesh or {DATA_AXIS: -1}).values())
    return None if -1 in sizes else math.prod(sizes)


def _check_axes(strategy: str, shape: Shape) -> None:
    text = ", ".join(f"{axis}: {size}" for axis, size in shape.items())
    needed = {"fsdp": (DATA_AXIS,), "hsdp": BATCH_AXES}.get(strategy, ())
    missing = [axis for axis in needed if axis not in shape]
    if missing:
        example = ", ".join(f"{axis}: {2 if axis == REPLICA_AXIS else -1}" for axis in needed)
        raise ConfigError(
            f"strategy: {strategy} needs an axis {missing[0]!r}, but {MAIN} is {{{text}}}: write for example "
            f"mesh: {{{example}}}"
        )
    if REPLICA_AXIS in shape and strategy != "hsdp":
        raise ConfigError(
            f"{MAIN}: {{{text}}}: the axis {REPLICA_AXIS!r} is for strategy: hsdp, which keeps a copy of the model for "
            f"each of its places; name it {DATA_AXIS!r}, or set type: hsdp"
        )


def _resolved(name: str, shape: Shape, devices: int, remedy: str) -> dict[str, int]:
    known = math.prod(size for size in shape.values() if size != -1)
    text = ", ".join(f"{axis}: {size}" for axis, size in shape.items())
    if -1 in shape.values():
        if devices % known:
            raise ConfigError(
                f"{name}: {{{text}}}: the sizes that are given make {known}, which does not divide the {devices} "
                f"devices; change them, or {remedy}"
            )
        return {axis: devices // known if size == -1 else size for axis, size in shape.items()}
    if known != devices:
        raise ConfigError(
            f"{name}: {{{text}}} is a mesh of {known} devices, but there are {devices}; change a size (-1 is "
            f"whatever the others leave over), or {remedy}"
        )
    return dict(shape)
