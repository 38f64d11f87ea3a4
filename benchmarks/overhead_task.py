"""The network of workload.py as a Lockstep task, for `lockstep train`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workload import Probe, make_data, make_model, make_optimizer

import lockstep


class Timed(lockstep.Task):
    def __init__(self, steps: int, stamps: str) -> None:
        self._probe = Probe(steps, stamps)

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> TensorDataset:
        return make_data()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return self._probe.loss(model, batch)
