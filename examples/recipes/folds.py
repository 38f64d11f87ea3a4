"""k-fold cross-validation: the fold is an argument of the task, and a run each."""

from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import lockstep

FOLDS = 4


class Folds(lockstep.Task):
    def __init__(self, fold: int = 0) -> None:
        inputs = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
        self.data, self.fold = TensorDataset(inputs, (inputs.sum(1) > 0).long()), fold

    def model(self) -> nn.Module:
        return nn.Linear(8, 2)

    def train_data(self) -> Dataset:
        return Subset(self.data, [index for index in range(len(self.data)) if index % FOLDS != self.fold])

    def val_data(self) -> Dataset:
        return Subset(self.data, range(self.fold, len(self.data), FOLDS))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}


if __name__ == "__main__":
    task = f"{Path(__file__).resolve()}:Folds"
    runs = [
        lockstep.train(task={"type": task, "fold": fold}, processes=2, train={"epochs": 2, "batch_size": 32})
        for fold in range(FOLDS)
    ]
    print(f"val/accuracy over {FOLDS} folds: {mean(run['metrics']['val/accuracy'] for run in runs):.3f}")
