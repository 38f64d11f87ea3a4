"""Device families: one file each, chosen by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.runtime.base import Runtime

# torch is imported inside the functions below, so that a run on explicit settings is planned without it.


def resolve(runtime: str, processes: str | int, share: bool = False) -> tuple[str, int]:
    """The device family and the number of processes on this host that `auto` stands for here."""
    if runtime == "auto":
        runtime = "cuda" if _gpu_count() else "cpu"
    if runtime == "xla":
        raise ConfigError("runtime: xla is not part of this version; use cpu, cuda or auto")
    if runtime == "cuda":
        from lockstep.runtime.cuda import check_devices

        present = _gpu_count()
        wanted = max(present, 1) if processes == "auto" else int(processes)
        check_devices(min(wanted, 1) if share else wanted, present)
        return runtime, wanted
    return runtime, 1 if processes == "auto" else int(processes)


def unused_devices(runtime: str, processes: int) -> str | None:
    """What to tell a user whose run leaves GPUs of this host idle."""
    if runtime != "cuda" or processes >= (present := _gpu_count()):
        return None
    return f"{processes} of {present} visible GPUs will be used; processes: auto uses them all"


def create(runtime: str, local_rank: int, share: bool = False) -> Runtime:
    """The runtime of this process, on the device that its local rank picks; with `share`, others may have it too."""
    from lockstep.runtime.cpu import CpuRuntime
    from lockstep.runtime.cuda import CudaRuntime

    return {"cpu": CpuRuntime, "cuda": CudaRuntime}[runtime](local_rank, share)


def _gpu_count() -> int:
    """How many GPUs torch can use; asks torch only where there is a driver, since importing it takes seconds."""
    driver = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi")
    if not driver or os.environ.get("CUDA_VISIBLE_DEVICES", None) in ("", "-1"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
