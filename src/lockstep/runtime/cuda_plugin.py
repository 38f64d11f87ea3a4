"""CUDA through PJRT: torch_xla 2.9 has no CUDA support of its own, but loads any PJRT plugin. JAX ships one.

The plugin comes from the jax-cuda12-pjrt package (`pip install 'lockstep-train[xla-cuda]'`), which needs CUDA 12
libraries and a GPU; JAX itself is not needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.runtime import pjrt

NAME = "CUDA"
_SHOWN_AS = b"gpu"
# That of jax-cuda12-pjrt 0.7.1, made for the JAX that torch_xla 2.9 names. A plugin of 0.76 opens its devices and
# refuses the first program, since torch_xla's is older.
_NEWEST_API = (0, 75)
_PACKAGES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")  # by the CUDA that they need
_LIBRARY = "xla_cuda_plugin.so"


@functools.cache
def register() -> None:
    """Make PJRT_DEVICE=CUDA known to torch_xla, before it opens a device: once in a process, however often it runs."""
    from torch_xla.experimental import plugins

    library = library_path()
    count = pjrt.gpu_count(os.environ)
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
    plugins.register_plugin(NAME, CudaPlugin())


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
    """The beginning of PJRT_Api, whose fields keep their places from version to version."""

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
    """torch_xla 2.9 ends the process over a device that calls itself CUDA; under a name it does not know it works.

    The plugin's table of functions is one for everybody who loads the library: the answer to its name is replaced.
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
    """What the plugin is told when it opens its devices, from the variables that torch_xla documents."""
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
