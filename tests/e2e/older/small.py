"""The task of the runs in this folder, which versions 0.3 to 0.5 have trained for 18 steps, with a save at step 16."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Task


class Small(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Linear(3, 1))

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(48, 4, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)
