"""The CPU: one process is one device."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, ClassVar

import torch

from lockstep.runtime.base import Runtime

# The inode that Linux gives the process namespace of the host itself.
_HOST_NAMESPACE = 0xEFFFFFFC


class CpuRuntime(Runtime):
    name: ClassVar[str] = "cpu"
    backend = "gloo"

    def __init__(self, local_rank: int = 0, share: bool = False) -> None:
        super().__init__(torch.device("cpu"))

    def move(self, batch: Any) -> Any:
        return batch  # batches are made where they are used

    def identity(self) -> str:
        return f"{socket.gethostname()}/cpu/pid-{os.getpid()}{_container()}"


def _container() -> str:
    """Containers on one host may share its name and process ids."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return "" if namespace == _HOST_NAMESPACE else f"-in-{namespace}"
