"""The meshes that a config declares, with their sizes: worked out without asking any device, or importing torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.config.schema import Strategy
from lockstep.errors import ConfigError

MAIN = "strategy.mesh"
DATA_AXIS = "data"

Shape = Mapping[str, int]


def resolve_meshes(settings: Strategy, devices: int, remedy: str = "devices") -> dict[str, dict[str, int]]:
    """Every mesh with its sizes known, the main one first; each has to use exactly the devices that there are.

    `remedy` is what else a user can change, where that is not the number of devices.
    """
    shapes = {MAIN: settings.mesh or {DATA_AXIS: -1}}
    shapes |= {f"strategy.meshes.{name}": shape for name, shape in settings.meshes.items()}
    return {name: _resolved(name, shape, devices, remedy) for name, shape in shapes.items()}


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
