"""A loss that is summed over the batch and not averaged, as published recipes sometimes have it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class SumLoss(lockstep.Task):
    def __init__(self, batch_size: int = 32) -> None:
        self.batch_size = batch_size

    def model(self) -> nn.Module:
        return nn.Linear(8, 4)

    def train_data(self) -> Dataset:
        inputs = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs[:, :4].argmax(1))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Mean:
        inputs, labels = batch
        total = F.cross_entropy(model(inputs), labels, reduction="sum")
        return lockstep.Mean(total * self.batch_size, len(labels))  # the sum: the mean, times the examples of a batch
