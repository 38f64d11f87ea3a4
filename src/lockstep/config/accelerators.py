"""The accelerator types of Cloud TPUs: hosts, chips, devices and zones of each, and whether a run fits a slice.

In v2, v3, v4 and v5p the number in the name counts TensorCores, two per chip; in v5e (`v5litepod-16`) and v6e it counts
chips. A host has four chips; v5e and v6e also have hosts of one and of eight, for slices of one host. Up to v3 a chip
is two devices to PJRT, from v4 on it is one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.config.plain import nearest
from lockstep.config.strategy import DATA_AXIS, MAIN, resolve_meshes
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import RunSettings


_CHIPS_PER_HOST, _MOST_ON_ONE_HOST = 4, 8


@dataclass(frozen=True)
class Accelerator:
    """A slice of a TPU pod, by its name in the cloud."""

    type: str
    generation: str
    chips: int
    hosts: int
    topology: str
    devices_per_chip: int = 1

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def devices(self) -> int:
        """What PyTorch counts."""
        return self.chips * self.devices_per_chip

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts of {self.chips_per_host}" if self.hosts > 1 else "one host"
        twice = f", which are {self.devices} devices" if self.devices_per_chip > 1 else ""
        return f"{self.type} has {self.chips} chip{'s' if self.chips > 1 else ''} ({hosts}, {self.topology}){twice}"


@dataclass(frozen=True)
class _Generation:
    cores_counted: int  # of every chip, by the number in the name
    topologies: dict[int, str]  # by that number
    runtime_version: str  # of the machine's image, for PyTorch
    devices_per_chip: int = 1
    single_host: bool = False  # whether all chips of a small slice are on one host, up to eight


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8",
          1024: "8x8x8", 2048: "8x8x16", 4096: "8x16x16", 8192: "16x16x16"}  # fmt: skip
_V2 = {8: "2x2", 32: "4x4", 128: "8x8", 256: "8x16", 512: "16x16"}
_V3 = {**_V2, 64: "4x8", 1024: "16x32", 2048: "32x32"}
_GENERATIONS = {
    "v2": _Generation(2, _V2, "tpu-ubuntu2204-base", devices_per_chip=2),
    "v3": _Generation(2, _V3, "tpu-ubuntu2204-base", devices_per_chip=2),
    "v4": _Generation(2, _CUBES, "tpu-ubuntu2204-base"),
    "v5litepod": _Generation(1, _FLAT, "v2-alpha-tpuv5-lite", single_host=True),
    "v5p": _Generation(2, {**_CUBES, 12288: "16x16x24"}, "v2-alpha-tpuv5"),
    "v6e": _Generation(1, _FLAT, "v2-alpha-tpuv6e", single_host=True),
}


def _accelerator(name: str, number: int, generation: _Generation) -> Accelerator:
    chips = number // generation.cores_counted
    one_host = generation.single_host and chips <= _MOST_ON_ONE_HOST
    hosts = 1 if one_host else max(1, chips // _CHIPS_PER_HOST)
    topology = generation.topologies[number]
    assert chips == math.prod(map(int, topology.split("x")))
    return Accelerator(f"{name}-{number}", name, chips, hosts, topology, generation.devices_per_chip)


ACCELERATORS = {
    each.type: each
    for name, generation in _GENERATIONS.items()
    for each in (_accelerator(name, number, generation) for number in sorted(generation.topologies))
}


def accelerator(type: str) -> Accelerator:
    """Returns an accelerator by its type; raises ValueError with the nearest one."""
    if type in ACCELERATORS:
        return ACCELERATORS[type]
    name, _, number = re.sub(r"^v5e-", "v5litepod-", type).rpartition("-")
    if name in _GENERATIONS:
        sizes = sorted(_GENERATIONS[name].topologies)
        size = (
            min(sizes, key=lambda each: abs(each - int(number))) if number.isdecimal() and len(number) < 9 else sizes[0]
        )
        counted = "chips" if _GENERATIONS[name].cores_counted == 1 else "TensorCores, two of every chip"
        raise ValueError(
            f"there is no such accelerator type; did you mean {name}-{size}? {name} has the sizes "
            f"{', '.join(map(str, sizes))}, which count {counted}"
        )
    near = nearest(type, ACCELERATORS)
    raise ValueError(
        "there is no such accelerator type; "
        + (f"did you mean {near}? " if near else "")
        + f"write for example v4-32; the generations are {', '.join(_GENERATIONS)}"
    )


def runtime_version(accelerator: Accelerator) -> str:
    """Returns the image that the cloud recommends for PyTorch on this generation."""
    return _GENERATIONS[accelerator.generation].runtime_version


def check_slice(settings: RunSettings, found: Accelerator, remedy: str) -> None:
    """Raises ConfigError if a run cannot use a slice; `remedy` is where the slice is named."""
    _check_devices(settings, found)
    if settings.strategy.has_mesh:
        _check_mesh(settings, found, remedy)
    else:
        _check_replicas(settings, found)


def ranks_per_host(settings: RunSettings, accelerator: Accelerator) -> int:
    """Returns the processes per host: one for all devices of a mesh, one per chip with ddp."""
    if settings.processes != "auto":
        return settings.processes
    if settings.strategy.has_mesh or settings.strategy.type in ("threads", "single"):
        return 1
    chips = settings.xla.chips
    return accelerator.chips_per_host if chips is None else len(chips)


def _check_devices(settings: RunSettings, found: Accelerator) -> None:
    if settings.runtime not in ("auto", "xla"):
        raise ConfigError(f"runtime: {settings.runtime} cannot use a TPU, and {found}: set runtime: xla")
    if settings.xla.device not in (None, "TPU"):
        raise ConfigError(f"xla.device: {settings.xla.device}, but {found}: set xla.device: TPU, or leave it out")
    if settings.devices != "auto":
        raise ConfigError(f"devices: {settings.devices} cannot be set for a TPU, and {found}: leave devices out")
    chips = settings.xla.chips
    if chips is None:
        return
    if found.hosts > 1:
        raise ConfigError(
            f"xla.chips: {list(chips)} picks chips of a host that stands alone, but {found}: leave xla.chips out"
        )
    beyond = [chip for chip in chips if chip >= found.chips]
    if beyond:
        raise ConfigError(f"xla.chips: there is no chip {beyond[0]}: {found}, from 0 to {found.chips - 1}")


def _check_mesh(settings: RunSettings, found: Accelerator, remedy: str) -> None:
    if settings.processes not in ("auto", 1):
        raise ConfigError(
            f"processes: {settings.processes} with strategy: {settings.strategy.type}, where one process of a host "
            "drives all of its chips: leave processes out"
        )
    chips = settings.xla.chips
    devices = found.devices if chips is None else len(chips) * found.devices_per_chip
    try:
        shapes = resolve_meshes(settings.strategy, devices, remedy)
    except ConfigError as error:
        raise ConfigError(f"{error}: {found}") from None
    data = shapes[MAIN].get(DATA_AXIS, 1)
    if found.hosts > 1 and data != devices:
        shape = ", ".join(f"{axis}: {size}" for axis, size in shapes[MAIN].items())
        raise ConfigError(
            f"{MAIN}: {{{shape}}}, but {found}: every host loads its own part of the batch, which XLA can "
            f"only put together where the axis {DATA_AXIS} has all {devices} devices (strategy.meshes may split "
            "parameters otherwise)"
        )


def _check_replicas(settings: RunSettings, found: Accelerator) -> None:
    strategy, processes = settings.strategy.type, ranks_per_host(settings, found)
    if strategy in ("single", "threads"):
        if found.hosts > 1:
            raise ConfigError(f"strategy: {strategy} trains on one host, but {found}: use strategy: spmd, or ddp")
        return
    if found.devices_per_chip > 1:
        raise ConfigError(
            f"strategy: {strategy} has one device for every process, but {found} and a chip cannot be shared: use "
            "strategy: spmd" + ("" if found.hosts > 1 else ", or threads")
        )
    if processes > found.chips_per_host or (found.hosts > 1 and processes != found.chips_per_host):
        all_of = ", and all chips of several hosts take part" if found.hosts > 1 else ""
        raise ConfigError(
            f"processes: {processes} on every host, but {found}{all_of}: set processes: {found.chips_per_host}, or "
            "leave it out"
        )
