"""Tasks that are evaluated, predict and are exported, once they are trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tasks import Tiny


class Useful(Tiny):
    """Predicts from its own data or from a file of numbers. `pause` makes it slow, `wrong` makes predict misbehave."""

    def __init__(self, pause: float = 0.0, wrong: str = "", **rest: Any) -> None:
        super().__init__(**rest)
        self.pause, self.wrong = pause, wrong

    def test_data(self) -> Dataset[Any]:
        torch.manual_seed(3)
        return TensorDataset(torch.randn(53, 8), torch.arange(53) % 4)

    def spare_data(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(5, 8), torch.zeros(5, dtype=torch.long))

    def predict(self, model: nn.Module, batch: list[Tensor]) -> Any:
        time.sleep(self.pause)
        scores = model(batch[0])
        if self.wrong == "number":
            return {"label": scores.argmax()}
        if self.wrong == "nothing":
            return None
        if self.wrong == "many":
            return {"label": scores.flatten()}
        names = [f"class {each}" for each in scores.argmax(1).tolist()]
        return {"label": scores.argmax(1), "scores": scores.softmax(1), "name": names}

    def predict_data(self, input: str) -> Dataset[Any]:
        rows = [[float(each) for each in line.split()] for line in Path(input).read_text().splitlines()]
        return TensorDataset(torch.tensor(rows))


class Prepared(Useful):
    """A model of a width that is known when the task begins."""

    def begin(self, run: Any, config: Any) -> None:
        self.width = 6

    def model(self) -> nn.Module:
        torch.manual_seed(0)  # data, of which only training makes all, draws numbers too
        return nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 4))


class Branching(Useful):
    """A model that no program can be made of."""

    def model(self) -> nn.Module:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) if x.sum().item() > 0 else super().forward(-x)

        return Net(8, 4)
