"""Whether a run could use a slice of Cloud TPUs: worked out from its settings alone."""

from __future__ import annotations

from lockstep.config.accelerators import Accelerator
from lockstep.config.mesh import DATA_AXIS, MAIN, resolve_meshes
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError


def check_slice(settings: RunSettings, found: Accelerator, remedy: str) -> None:
    """Raises where it could not; `remedy` is where the slice is named."""
    _check_devices(settings, found)
    if settings.strategy.has_mesh:
        _check_mesh(settings, found, remedy)
    else:
        _check_replicas(settings, found)


def ranks_per_host(settings: RunSettings, accelerator: Accelerator) -> int:
    """Processes on every host: one drives all devices of a mesh, and ddp has one for each chip."""
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
            f"xla.chips: {list(chips)} picks chips of a host that stands alone, but {found}: leave xla.chips out, or "
            f"take one host ({_one_host(found)})"
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
        raise ConfigError(
            f"{MAIN}: {_text(shapes[MAIN])}, but {found}: every host loads its own part of the batch, which XLA can "
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
    if processes > found.chips_per_host:
        raise ConfigError(
            f"processes: {processes} on every host, but {found}: set processes: {found.chips_per_host}, or leave it out"
        )
    if found.hosts > 1 and processes != found.chips_per_host:
        raise ConfigError(
            f"processes: {processes} on every host, but {found}, and all chips of several hosts take part: set "
            f"processes: {found.chips_per_host}, or leave it out"
        )


def _one_host(found: Accelerator) -> str:
    return f"{found.generation}-{4 if found.generation in ('v5litepod', 'v6e') else 8}"


def _text(shape: dict[str, int]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in shape.items()) + "}"
