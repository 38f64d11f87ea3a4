"""The task of the fault matrix: it has every kind of state that a resume must bring back, and one rank fails in it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from sabotage import FIRST_STEP, MID_EPOCH, NAN, PERTURB, SKIP, VALIDATION, saboteur
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

TROUBLE = saboteur()  # at import: before this rank reports to the roll call
EXAMPLES = 100


class Faulty(lockstep.Task):
    """Classify points by a fixed random teacher, with dropout."""

    def __init__(self) -> None:
        self._calls = 0

    def model(self) -> nn.Module:
        layers = {"hidden": nn.Linear(8, 16), "relu": nn.ReLU(), "dropout": nn.Dropout(0.3), "output": nn.Linear(16, 4)}
        model = nn.Sequential(OrderedDict(layers))
        if TROUBLE is not None:
            TROUBLE.model = model
        return model

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(EXAMPLES, 8, generator=generator)
        teacher = torch.randn(8, 4, generator=generator)
        return TensorDataset(inputs, (inputs @ teacher).argmax(1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        if TROUBLE is None or not model.training:
            return F.cross_entropy(model(inputs), labels)
        self._calls += 1
        time.sleep(TROUBLE.fault.slow)
        TROUBLE.reached(FIRST_STEP if self._calls == 1 else MID_EPOCH, self._calls)
        if TROUBLE.taking(PERTURB):
            TROUBLE.perturb()
        if TROUBLE.fault.moment in (FIRST_STEP, MID_EPOCH) and TROUBLE.taking(SKIP):
            if not hasattr(model, "module"):  # no wrapper to go past: the model is left out
                return torch.zeros((), requires_grad=True)
            model = model.module
        loss = F.cross_entropy(model(inputs), labels)
        return loss * float("nan") if TROUBLE.taking(NAN) else loss

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        if TROUBLE is not None:
            TROUBLE.reached(VALIDATION, self._calls)
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}
