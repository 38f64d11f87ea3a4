"""The PJRT runtime without torch_xla: its environment variables, its devices, and a plugin for CUDA.

torch_xla 2.9 has no CUDA support, but loads any PJRT plugin. The one of jax-cuda12-pjrt (`pip install
'lockstep-train[xla-cuda]'`) needs CUDA 12 libraries and a GPU, not JAX itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Returns CPU, TPU or CUDA: from the config, then from PJRT_DEVICE, then CPU."""
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
    if settings.strategy.splits_sequences:
        raise ConfigError("strategy.mesh: the axis context splits sequences on cpu and cuda, not on xla: remove it")
    for name in settings.strategy.given_for_blocks:
        raise ConfigError(
            f"strategy.{name}: {getattr(settings.strategy, name)}: XLA's compiler decides when and in what dtype "
            "parameters and gradients travel: remove it (train.precision: bf16 computes in bf16)"
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
    """Returns what `auto` stands for: one process per device for ddp on accelerators, else one."""
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
    """Returns the visible GPUs without opening any."""
    present = len([each for each in Path("/dev").glob("nvidia[0-9]*") if each.name[6:].isdigit()])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [each for each in visible.split(",") if each.strip() not in ("", "-1")]
    return min(present, len(named))


CUDA_PLUGIN = "CUDA"
_SHOWN_AS = b"gpu"
# That of jax-cuda12-pjrt 0.7.1, made for the JAX that torch_xla 2.9 names. A plugin of 0.76 opens its devices and
# refuses the first program, since torch_xla's is older.
_NEWEST_API = (0, 75)
_PACKAGES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")  # by the CUDA that they need
_LIBRARY = "xla_cuda_plugin.so"


@functools.cache
def register_cuda_plugin() -> None:
    """Registers PJRT_DEVICE=CUDA with torch_xla, before it opens a device."""
    from torch_xla.experimental import plugins

    library = library_path()
    count = gpu_count(os.environ)
    if count == 0:
        raise ConfigError(
            "PJRT_DEVICE=CUDA, but this host shows no GPU (/dev/nvidia0 is not there, or CUDA_VISIBLE_DEVICES hides "
            "it): check with nvidia-smi, or use PJRT_DEVICE=CPU"
        )

    class CudaPlugin(plugins.DevicePlugin):  # type: ignore[misc]
        def library_path(self) -> str:
            return library

        def physical_chip_count(self) -> int:
            return count

        def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
            os.environ.setdefault("LOCAL_RANK", str(local_rank))

        def client_create_options(self) -> dict[str, object]:
            return client_options(os.environ)

        def requires_xla_coordinator(self) -> bool:
            return int(os.environ.get("WORLD_SIZE", "1")) > 1

    _go_by_another_name(library)
    plugins.use_dynamic_plugins()
    plugins.register_plugin(CUDA_PLUGIN, CudaPlugin())


class _NameAsked(ctypes.Structure):
    """PJRT_Client_PlatformName_Args of the PJRT C API."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("client", ctypes.c_void_p),
        ("platform_name", ctypes.c_char_p),
        ("platform_name_size", ctypes.c_size_t),
    )


class _Api(ctypes.Structure):
    """The beginning of PJRT_Api, whose layout is stable."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
        ("errors_plugin_and_events", ctypes.c_void_p * 10),
        ("client_create", ctypes.c_void_p),
        ("client_destroy", ctypes.c_void_p),
        ("client_platform_name", ctypes.c_void_p),
    )


def _tell_the_other_name(asked: Any) -> None:
    asked.contents.platform_name, asked.contents.platform_name_size = _SHOWN_AS, len(_SHOWN_AS)


# Kept for as long as the process lives: the plugin holds nothing but its address.
_answer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_NameAsked))(_tell_the_other_name)


def _go_by_another_name(library: str) -> None:
    """Renames the platform: torch_xla 2.9 aborts for a device that calls itself CUDA.

    The plugin's function table is shared by everybody who loads the library; the answer to its name is replaced.
    """
    give = ctypes.CDLL(library).GetPjrtApi
    give.restype = ctypes.POINTER(_Api)
    api = give()
    speaks = (api.contents.major_version, api.contents.minor_version)
    if speaks > _NEWEST_API:
        raise ConfigError(
            f"PJRT_DEVICE=CUDA: {library} speaks version {speaks[0]}.{speaks[1]} of the PJRT API, and torch_xla 2.9 "
            f"none after {_NEWEST_API[0]}.{_NEWEST_API[1]}: pip install 'jax-cuda12-pjrt==0.7.1'"
        )
    page = ctypes.addressof(api.contents) // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.addressof(api.contents) + ctypes.sizeof(_Api) - page
    libc = ctypes.CDLL(None, use_errno=True)
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), writable):
        raise ConfigError(f"PJRT_DEVICE=CUDA: {library} cannot be used: {os.strerror(ctypes.get_errno())}")
    api.contents.client_platform_name = ctypes.cast(_answer, ctypes.c_void_p).value


def library_path() -> str:
    """The plugin's library, without importing JAX."""
    for package in _PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (found.submodule_search_locations or []) if found else []:
            if (Path(folder) / _LIBRARY).is_file():
                return str(Path(folder) / _LIBRARY)
    raise ConfigError(
        "PJRT_DEVICE=CUDA needs a PJRT plugin for CUDA, which torch_xla 2.9 does not bring along: "
        "pip install 'lockstep-train[xla-cuda]' (the jax-cuda12-pjrt package)"
    )


def client_options(env: Mapping[str, str]) -> dict[str, object]:
    """Returns the plugin's options, from the variables that torch_xla documents."""
    options: dict[str, object] = {"platform_name": "cuda"}
    if "PJRT_ALLOCATOR_FRACTION" in env:
        options["memory_fraction"] = float(env["PJRT_ALLOCATOR_FRACTION"])
    if "PJRT_ALLOCATOR_PREALLOCATE" in env:
        options["preallocate"] = env["PJRT_ALLOCATOR_PREALLOCATE"].lower() == "true"
    world = int(env.get("WORLD_SIZE", "1"))
    if world > 1:
        options |= {
            "num_nodes": world,
            "node_id": int(env["RANK"]),
            "visible_devices": [int(env.get("LOCAL_RANK", "0"))],
        }
    elif "GPU_NUM_DEVICES" in env:
        options["visible_devices"] = list(range(int(env["GPU_NUM_DEVICES"])))
    return options
