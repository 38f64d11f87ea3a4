"""The small network that overhead.py and startup.py train everywhere, and the probe that times it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES, HIDDEN, CLASSES = 64, 128, 10
BATCH = 32  # per process
EXAMPLES = 512 * BATCH


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (EXAMPLES,), generator=generator))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Probe:
    """Notes the time of every call of the loss, and writes all of them down at the last one (on rank 0)."""

    def __init__(self, steps: int, file: str) -> None:
        self.steps, self._file = steps, file
        self._stamps: list[float] = []

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self._stamps.append(time.perf_counter())
        if len(self._stamps) == self.steps and os.environ.get("RANK", "0") == "0":
            Path(self._file).write_text(json.dumps(self._stamps), encoding="utf-8")
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)
