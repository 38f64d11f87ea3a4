"""Slices of Cloud TPUs by the names that they are rented by, and what libtpu calls them."""

from __future__ import annotations

import re
from typing import Any

from lockstep.config.accelerators import Accelerator, accelerator

# v5e is what everybody calls it; v5litepod is what it is rented as.
_SHORT = {"v5litepod": "v5e"}
_TWO_CORES_IN_ONE = ("v4", "v5p")


def slice_of(text: str) -> Accelerator:
    """Raises ValueError with the nearest name."""
    return accelerator(re.sub(r"^v5e-", "v5litepod-", text.strip().lower()))


def device_name(found: Accelerator) -> str:
    """As devices.yaml has it."""
    return _SHORT.get(found.generation, found.generation)


def topology(found: Accelerator) -> dict[str, Any]:
    """How libtpu wants to be asked for it."""
    sides = [int(each) for each in found.topology.split("x")]
    chips = found.chips_per_host
    hosts = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[chips]
    asked: dict[str, Any] = {
        "topology_name": f"{device_name(found)}:{'x'.join(map(str, sides))}",
        "chips_per_host_bounds": hosts,
    }
    if found.generation in _TWO_CORES_IN_ONE:
        asked["chip_config_name"] = "megacore"
    return asked
