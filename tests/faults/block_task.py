"""A stack of blocks, and one rank that hangs at its third step: in the second block, or outside of all of them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

STEP = 3


class Block(nn.Module):
    """Hangs in its third forward pass of training, or in the backward pass that belongs to it."""

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.hangs, self.calls = hangs, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.hangs == "forward" and self.calls == STEP:
            _hang()
        hidden = self.inner(x)
        if self.hangs == "backward" and self.calls == STEP:
            hidden.register_hook(_hang)
        found: Tensor = x + self.out(F.gelu(hidden))
        return found


class Model(nn.Module):
    def __init__(self, hangs: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Block(hangs if name == "b" else "") for name in "abc"})
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers.values():
            x = each(x)
        found: Tensor = self.head(x)
        return found


class Stuck(lockstep.Task):
    def __init__(self, where: str) -> None:
        self.hangs = where if os.environ.get("RANK") == "1" else ""
        self.calls = 0

    def model(self) -> nn.Module:
        return Model(self.hangs)

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(100, 8, generator=generator), torch.arange(100) % 4)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        found = model(batch[0])
        self.calls += model.training
        if model.training:
            self._at("loss")
        return F.cross_entropy(found, batch[1])

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        found = model(batch[0])
        self._at("validation")
        return {"accuracy": (found.argmax(1) == batch[1]).float()}

    def _at(self, where: str) -> None:
        if self.hangs == where and self.calls == STEP:
            _hang()


def _hang(*about: Any) -> None:
    time.sleep(3600)
