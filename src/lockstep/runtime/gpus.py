"""The NVIDIA GPUs of this host, counted with the driver's library: importing torch would take seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from lockstep.errors import ConfigError


def gpu_count() -> int:
    """Returns how many GPUs torch can use. Torch is asked only if the driver's answer is not enough."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi")
    if not driver or visible in ("", "-1"):
        return 0
    found = None if "torch" in sys.modules else _counted_by_driver()
    if found is not None and (usable := visible_of(found, visible)) is not None:
        return usable
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_of(present: int, visible: str | None) -> int | None:
    """Returns how many GPUs CUDA_VISIBLE_DEVICES leaves, or None if it does not use numbers."""
    if visible is None:
        return present
    names = [each.strip() for each in visible.split(",")]
    if not all(each.isdecimal() for each in names):
        return None
    numbers = [int(each) for each in names]
    if len(set(numbers)) < len(numbers):
        return 0
    return next((index for index, number in enumerate(numbers) if number >= present), len(numbers))


def _counted_by_driver() -> int | None:
    """Returns None if torch has no CUDA, or a newer one than the driver."""
    wanted = _cuda_of_torch()
    if wanted is None:
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        count, version = ctypes.c_int(0), ctypes.c_int(0)
        failed = (
            library.nvmlInit_v2()
            or library.nvmlSystemGetCudaDriverVersion(ctypes.byref(version))
            or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        )
    except (OSError, AttributeError):
        return None
    return None if failed or version.value // 1000 < wanted else count.value


def _cuda_of_torch() -> int | None:
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def check_devices(wanted: int, present: int) -> None:
    if wanted <= present:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "CUDA_VISIBLE_DEVICES is not set"
    if present == 0:
        import torch

        raise ConfigError(
            f"runtime: cuda was asked for but torch {torch.__version__} sees no GPU ({shown}). "
            "Check the driver with nvidia-smi and that torch was built for CUDA, or use runtime: cpu"
        )
    raise ConfigError(
        f"processes: {wanted} processes need {wanted} GPUs on this host, but {present} are visible ({shown}). "
        f"Set processes to {present} or less, make more GPUs visible, or let processes share a GPU with "
        "launch.share_devices: true"
    )
