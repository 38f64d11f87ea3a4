"""What the PJRT runtime reads from the environment, worked out from the settings. Knows neither torch nor torch_xla."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import RunSettings

DEVICE = "PJRT_DEVICE"
FAMILIES = ("CPU", "TPU", "CUDA")
_OLD_NAMES = {"GPU": "CUDA"}
_INSTALL = "pip install 'lockstep-train[xla]'"
_GOOGLE_VENDOR = "0x1ae0"
# As they report themselves on the PCI bus: v2 and v3, v4, v5e, v6e, 7x. Google's network cards have other ids.
_TPU_IDS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


def device_family(settings: RunSettings, env: Mapping[str, str]) -> str:
    """CPU, TPU or CUDA: as the config says, else as PJRT_DEVICE says, else the CPU."""
    asked = settings.xla.device or env.get(DEVICE) or "CPU"
    # PJRT takes `TPU_C_API` and the like for TPU.
    family = _OLD_NAMES.get(asked.upper().split("_")[0], asked.upper().split("_")[0])
    if family not in FAMILIES:
        raise ConfigError(f"{DEVICE}={asked!r} is not known: use CPU, TPU or CUDA")
    return family


def variables(settings: RunSettings, env: Mapping[str, str]) -> dict[str, str]:
    family, xla = device_family(settings, env), settings.xla
    found = {DEVICE: family}
    if settings.devices != "auto":
        found[{"CPU": "CPU_NUM_DEVICES", "CUDA": "GPU_NUM_DEVICES"}.get(family, "")] = str(settings.devices)
    if xla.memory_fraction is not None:
        found["PJRT_ALLOCATOR_FRACTION"] = str(xla.memory_fraction)
    if xla.preallocate is not None:
        found["PJRT_ALLOCATOR_PREALLOCATE"] = str(xla.preallocate).lower()
    if family == "TPU" and xla.chips is not None:
        count = len(xla.chips)
        found["TPU_VISIBLE_CHIPS"] = ",".join(map(str, xla.chips))
        found["TPU_CHIPS_PER_PROCESS_BOUNDS"] = f"1,{count},1"
        found["TPU_PROCESS_BOUNDS"] = "1,1,1"
    found.pop("", None)
    return found


def check(settings: RunSettings, env: Mapping[str, str], processes: int) -> None:
    family, strategy = device_family(settings, env), settings.strategy.type
    if importlib.util.find_spec("torch_xla") is None:
        raise ConfigError(f"runtime: xla needs torch_xla, which is not installed: {_INSTALL}")
    if family == "TPU" and tpu_chips() == 0:
        raise ConfigError(
            f"{DEVICE}=TPU, but this host has no TPU chip on its PCI bus: use {DEVICE}=CPU (or xla.device: CPU) here"
        )
    if settings.devices != "auto" and family == "TPU":
        raise ConfigError(f"devices: {settings.devices} cannot be set for a TPU: name its chips with xla.chips: [0]")
    if settings.xla.chips is not None and family != "TPU":
        raise ConfigError(f"xla.chips: {list(settings.xla.chips)} names TPU chips, but the device family is {family}")
    if settings.strategy.has_mesh and processes > 1 and family == "CPU":
        raise ConfigError(
            f"strategy: {strategy} with {processes} processes cannot work on PJRT CPU: every process there is a world "
            f"of its own, so no mesh can span them. Use processes: 1 with devices: {processes}, or strategy: ddp"
        )
    if settings.strategy.offload:
        raise ConfigError(
            "strategy.offload: XLA keeps parameters on its devices, and cannot keep them on the host: take it away, or "
            "use more devices (strategy: fsdp splits parameters and optimizer state over them)"
        )
    if settings.strategy.param_dtype != "float32":
        raise ConfigError(
            f"strategy.param_dtype: {settings.strategy.param_dtype}: XLA's compiler decides itself in what it "
            f"sends parameters: "
            "take it away (train.precision: bf16 computes in bf16)"
        )
    if strategy == "threads" and processes > 1:
        raise ConfigError(
            f"strategy: threads drives all devices of one process, but there are {processes}: set processes: 1 and "
            "devices, or use strategy: ddp"
        )
    if strategy in ("auto", "single", "ddp") and settings.devices not in ("auto", 1):
        raise ConfigError(
            f"devices: {settings.devices} with strategy: {strategy}, which has one device per process: set "
            f"processes: {settings.devices} with ddp, or use strategy: spmd or threads"
        )


def processes(settings: RunSettings, env: Mapping[str, str]) -> int:
    """How many processes `auto` stands for: one per device for ddp on accelerators, else one."""
    family = device_family(settings, env)
    if family == "CPU" or settings.strategy.type not in ("ddp", "auto"):
        return 1
    if family == "CUDA":
        present, wanted = gpu_count(env), env.get("GPU_NUM_DEVICES", "")
        return max(1, min(present, int(wanted)) if wanted.isdigit() else present)
    chips = settings.xla.chips
    if chips is None and (visible := env.get("TPU_VISIBLE_CHIPS", "")):
        return len([each for each in visible.split(",") if each.strip()]) or 1
    return max(1, tpu_chips() if chips is None else len(chips))


def tpu_chips() -> int:
    found = 0
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE_VENDOR:
                found += (vendor.parent / "device").read_text().strip() in _TPU_IDS
        except OSError:
            continue
    return found


def gpu_count(env: Mapping[str, str]) -> int:
    """GPUs that a process here may use, without opening any."""
    present = len([each for each in Path("/dev").glob("nvidia[0-9]*") if each.name[6:].isdigit()])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [each for each in visible.split(",") if each.strip() not in ("", "-1")]
    return min(present, len(named))
