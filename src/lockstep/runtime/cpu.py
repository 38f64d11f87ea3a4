"""The CPU: one process is one device."""

from __future__ import annotations

import os
import socket
from typing import Any, ClassVar

import torch

from lockstep.runtime.base import Runtime


class CpuRuntime(Runtime):
    name: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(torch.device("cpu"))

    def move(self, batch: Any) -> Any:
        return batch  # batches are made where they are used

    def identity(self) -> str:
        return f"{socket.gethostname()}/cpu/pid-{os.getpid()}"
