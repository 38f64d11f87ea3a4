"""The tasks of plan.py: those of the examples, which note down how much memory torch's allocator has given out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import TextModel
from resnet50 import ImageNet


class Notes:
    """Written before every batch: the last of them is about all steps but the last."""

    def __init__(self, file: str) -> None:
        self._file = file

    def write(self) -> None:
        if not self._file or not torch.cuda.is_available():
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found = {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used": total - free,  # of the device, by every process on it
        }
        Path(self._file).write_text(json.dumps(found), encoding="utf-8")


class Text(TextModel):
    def __init__(self, notes: str = "", **size: Any) -> None:
        super().__init__(**size)
        self._notes = Notes(notes)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._notes.write()
        return super().loss(model, batch)


class Images(ImageNet):
    def __init__(self, notes: str = "", **size: Any) -> None:
        super().__init__(**size)
        self._notes = Notes(notes)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._notes.write()
        return super().loss(model, batch)
