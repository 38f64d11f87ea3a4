"""A task that writes down which examples each rank was given, and misbehaves when a file tells it to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from neighbour import WORD
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

EXAMPLES = 100


class Recorder(lockstep.Task):
    def __init__(self, orders: str, sleep: float = 0.0) -> None:
        self.orders, self.sleep = Path(orders), sleep
        self.rank = int(os.environ.get("RANK", "0"))
        print(f"the task is in {Path(__file__).parent} and has {WORD}")
        print("beside it:", *sorted(each.name for each in Path(__file__).parent.iterdir()))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(EXAMPLES, 8, generator=generator)
        teacher = torch.randn(8, 4, generator=generator)
        return TensorDataset(inputs, (inputs @ teacher).argmax(1), torch.arange(EXAMPLES))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, labels, numbers = batch
        if model.training:
            self._obey()
            time.sleep(self.sleep)
            with (self.orders / "seen").open("a") as file:
                file.write(f"{os.getpid()} {self.rank} {' '.join(map(str, numbers.tolist()))}\n")
        return F.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels, _ = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}

    def _obey(self) -> None:
        if self._ordered("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._ordered("hang"):
            time.sleep(3600)
        if self._ordered("raise"):
            raise ValueError("this example cannot be right")

    def _ordered(self, what: str) -> bool:
        order = self.orders / f"{what}-{self.rank}"
        if not order.exists():
            return False
        order.unlink()
        return True
