"""Devices by name and count: `h200x8`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from lockstep.config.accelerators import Accelerator, accelerator
from lockstep.config.plain import did_you_mean, read_text
from lockstep.config.values import Section
from lockstep.config.yaml_text import parse_yaml
from lockstep.errors import ConfigError

_TWO_CORES_IN_ONE = ("v4", "v5p")


def slice_of(text: str) -> Accelerator:
    """Returns a slice of Cloud TPUs by its name. Raises ValueError with the nearest name."""
    return accelerator(re.sub(r"^v5e-", "v5litepod-", text.strip().lower()))


def device_name(found: Accelerator) -> str:
    return found.generation.replace("v5litepod", "v5e")  # what it is rented as, and what everybody calls it


def topology(found: Accelerator) -> dict[str, Any]:
    chips = found.chips_per_host
    hosts = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[chips]
    asked: dict[str, Any] = {
        "topology_name": f"{device_name(found)}:{found.topology}",
        "chips_per_host_bounds": hosts,
    }
    if found.generation in _TWO_CORES_IN_ONE:
        asked["chip_config_name"] = "megacore"
    return asked


_TARGET = re.compile(r"(?P<name>.+?)(?:x(?P<count>\d+))?\Z")


class Device(Section):
    """The figures of a kind of device; a custom file of devices has the same keys."""

    vendor: str = "other"
    memory: float = Field(gt=0, description="GiB that a process can have")
    peak: dict[str, float] = Field(min_length=1, description="TFLOP/s by the type of number")
    bandwidth: float = Field(gt=0, description="GB/s of its memory")
    link: float = Field(gt=0, description="GB/s to the others of its host, both directions together")
    network: float = Field(gt=0, description="GB/s to another host, per device")
    per_host: int = Field(gt=0)
    source: str = ""


_DEVICES = TypeAdapter(dict[Any, Device])


@dataclass(frozen=True)
class Target:
    name: str
    device: Device
    count: int
    slice: Accelerator | None = None  # of Cloud TPUs

    @property
    def hosts(self) -> int:
        return self.slice.hosts if self.slice is not None else -(-self.count // self.device.per_host)

    @property
    def per_host(self) -> int:
        return self.count // self.slice.hosts if self.slice is not None else self.device.per_host

    @property
    def title(self) -> str:
        return self.name if self.slice is not None else f"{self.name}x{self.count}"


@cache
def known() -> dict[str, Device]:
    return _parsed(Path(__file__).with_name("devices.yaml"))


def target(text: str, more: Path | None = None) -> Target:
    """Parses `h200x8`, or `h200` for one; `more` is a file with custom devices."""
    devices = {**known(), **(_parsed(more) if more is not None else {})}
    if (found := _slice(text)) is not None:
        return Target(text.strip().lower(), devices[device_name(found)], found.devices, found)
    name, count = text.strip().lower(), None
    if name not in devices and (match := _TARGET.fullmatch(name)) is not None:  # rtx4090 is one, and not 4090 of rt
        name, count = match["name"], match["count"]
    if name not in devices:
        raise ConfigError(
            f"--on {text}: no device {name!r} is known, {did_you_mean(name, devices)} h200x8 is eight of them; "
            "v4-32 is a slice of Cloud TPUs; --devices FILE.yaml adds your own"
        )
    if devices[name].vendor == "google":
        raise ConfigError(f"--on {text}: TPUs come in slices, by the names that they are rented by: v4-32, v5e-16")
    if count is not None and int(count) < 1:
        raise ConfigError(f"--on {text}: a plan is for one device at least")
    return Target(name, devices[name], int(count or 1))


def _slice(text: str) -> Accelerator | None:
    """Returns a slice by its name, and refuses a size that its generation does not have."""
    try:
        return slice_of(text)
    except ValueError as error:
        if re.fullmatch(r"v(2|3|4|5e|5litepod|5p|6e)-\w+", text.strip().lower()):
            raise ConfigError(f"--on {text}: {error}") from None
        return None


def _parsed(file: Path) -> dict[str, Device]:
    try:
        found = _DEVICES.validate_python(parse_yaml(read_text(file)))
    except ValidationError as problems:
        first = problems.errors()[0]
        place = ".".join(map(str, first["loc"])) or "devices by name"
        raise ConfigError(f"--devices {file}: {place}: {first['msg'].lower()}, got {first.get('input')!r}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--devices {file}: cannot be read: {error}") from None
    return {str(name).lower(): device for name, device in found.items()}
