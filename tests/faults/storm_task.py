"""The task of the storm: every kind of state that a resume must bring back, in short steps."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

EXAMPLES, STEP_SECONDS = 96, float(os.environ.get("STORM_STEP_SECONDS", "0.05"))


class Points(Dataset[Any]):
    """Points with noise from every generator: whoever fetches them, and whenever, draws the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(EXAMPLES, 8, generator=generator)
        self._labels = (self._inputs @ torch.randn(8, 4, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Only workers are seeded by the place in the data; here the generators of the rank are drawn from.
        noise = torch.rand(8) * 0.1 + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return self._inputs[index] + noise, self._labels[index]


class Storm(lockstep.Task):
    """Classify points by a fixed random teacher, with dropout and batch norm."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)
        )  # fmt: skip

    def train_data(self) -> Dataset[Any]:
        return Points()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if model.training:
            time.sleep(STEP_SECONDS)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}


class Streamed(lockstep.Task):
    """A stream of numbers, which are also the losses: their mean tells what was read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return lockstep.TarShards(f"{self.folder}/*.tar", decode=decode)

    def val_data(self) -> Any:
        return self.train_data()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if model.training:
            time.sleep(STEP_SECONDS)
        loss: Tensor = batch.mean() + 0.0 * model(batch).sum()
        return loss


def decode(sample: dict[str, Any]) -> Tensor:
    return torch.tensor([float(sample["txt"])])
