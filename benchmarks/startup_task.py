"""The network of workload.py as a Lockstep task that writes down when its first step was finished."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workload import make_data, make_model, make_optimizer

import lockstep


class Stamped(lockstep.Task):
    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> TensorDataset:
        return make_data()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model)
        if os.environ["RANK"] == "0":
            optimizer.register_step_post_hook(lambda *_: self._file.write_text(str(time.time()), encoding="ascii"))
        return optimizer

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)
