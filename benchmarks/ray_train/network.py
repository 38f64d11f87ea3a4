"""The network and the data that both sides train, and the clock that both are measured by."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

EXAMPLES, WIDTH, CLASSES = 4096, 64, 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (EXAMPLES,), generator=generator))


class Clock:
    """Notes when every step computes its loss: from one to the next is a step, whoever's loop it is."""

    def __init__(self, file: str, steps: int) -> None:
        self._file, self._steps, self._times = Path(file), steps, list[float]()

    def tick(self) -> None:
        self._times.append(time.time())
        if len(self._times) == self._steps:
            gaps = [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]
            warm = gaps[len(gaps) // 4 :]
            found = {"first": self._times[1], "step": statistics.median(warm)}
            self._file.write_text(json.dumps(found), encoding="ascii")
