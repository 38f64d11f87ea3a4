"""CUDA through PJRT: torch_xla 2.9 has no CUDA support of its own, but loads any PJRT plugin. JAX ships one.

The plugin comes from the jax-cuda12-pjrt package (`pip install 'lockstep-train[xla-cuda]'`), which needs CUDA 12
libraries and a GPU; JAX itself is not needed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.runtime import pjrt

NAME = "CUDA"
_PACKAGES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")  # by the CUDA that they need
_LIBRARY = "xla_cuda_plugin.so"


def register() -> None:
    """Make PJRT_DEVICE=CUDA known to torch_xla, before it opens a device."""
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

    plugins.use_dynamic_plugins()
    plugins.register_plugin(NAME, CudaPlugin())


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
