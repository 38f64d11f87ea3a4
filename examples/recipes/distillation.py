"""Distillation: a small student learns from a frozen teacher."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Distillation(lockstep.Task):
    def __init__(self, temperature: float = 2.0) -> None:
        self.temperature = temperature

    def model(self) -> dict[str, nn.Module]:
        teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))  # load its weights here
        return {"student": nn.Linear(8, 4), "teacher": teacher.requires_grad_(False)}

    def train_data(self) -> Dataset:
        inputs = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        with torch.no_grad():
            wanted = (run.models["teacher"](inputs) / self.temperature).softmax(1)
        outputs = run.models["student"](inputs)
        soft = F.cross_entropy(outputs / self.temperature, wanted) * self.temperature**2
        loss = 0.9 * soft + 0.1 * F.cross_entropy(outputs, labels)
        run.backward(loss)
        run.step()
        return {"loss": loss, "soft": soft}
