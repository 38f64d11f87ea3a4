"""The task that memory.py trains: a GPT on so few tokens that weights and optimizer state are nearly all it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

TOKENS = 16


class Peak:
    """The most memory that this process has had, in bytes: of the GPU, or of the host."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def read(self) -> int:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def forget(self) -> None:
        """Count from now on."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Notes:
    """What a rank writes down: its peak while it made the model, and while it trained."""

    def __init__(self, file: str, on_gpu: bool) -> None:
        self._file, self._peak, self._set_up = file, Peak(on_gpu), 0

    def first_step(self) -> None:
        self._set_up = self._peak.read()
        self._peak.forget()

    def last_step(self) -> None:
        found = {"set up": self._set_up, "training": self._peak.read()}
        Path(f"{self._file}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found), encoding="utf-8")


def network(layers: int, width: int) -> nn.Module:
    return GPT(vocab=256, context=TOKENS, layers=layers, heads=8, width=width)


class Heavy(lockstep.Task):
    """`layers: 0` is no model to speak of: what a rank needs that has imported everything."""

    def __init__(self, layers: int, width: int, steps: int, notes: str, on_gpu: bool = False) -> None:
        self.layers, self.width, self.steps = layers, width, steps
        self._notes, self._calls = Notes(notes, on_gpu), 0

    def model(self) -> nn.Module:
        return network(self.layers, self.width) if self.layers else network(1, 8)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randint(256, (64, TOKENS + 1), generator=torch.Generator().manual_seed(0)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if self._calls == 0:
            self._notes.first_step()
        if self._calls == self.steps:
            self._notes.last_step()
        self._calls += 1
        loss: Any = model(batch[0][:, :-1], batch[0][:, 1:]).mean()
        return loss  # type: ignore[no-any-return]
