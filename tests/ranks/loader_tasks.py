"""The same task three times: with datasets, with DataLoaders, and a loop over loaders."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

import lockstep


class Points(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(90, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.inputs[index].sum() > 0)


def named(examples: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in examples]), "y": torch.tensor([y for _, y in examples])}


class WithDatasets(lockstep.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def train_data(self) -> Any:
        return Points()

    def val_data(self) -> Any:
        return Subset(Points(), range(5, 25))

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        return named(examples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"label": model(batch["x"]).argmax(1)}


class WithLoaders(lockstep.Task):
    model, loss, predict = WithDatasets.model, WithDatasets.loss, WithDatasets.predict  # type: ignore[assignment]

    def train_data(self) -> Any:
        return DataLoader(Points(), 16, shuffle=True, collate_fn=named)

    def val_data(self) -> Any:
        return DataLoader(Points(), 7, sampler=SubsetRandomSampler(range(5, 25)), collate_fn=named)


class OnlyTraining(WithLoaders):
    def val_data(self) -> Any:
        return None


def loop(run: lockstep.Run, until: int = 12) -> list[float]:
    """Trains with a loader that has a generator, to a step; returns the weights."""
    model = WithDatasets().model()
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    run.restore()
    loader = DataLoader(Points(), 16, shuffle=True, generator=torch.Generator().manual_seed(7), collate_fn=named)
    for _ in run.epochs(9):
        for batch in run.batches(loader):
            run.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
            run.step(optimizer)
            if run.progress.step == until:
                run.checkpoint()
                return [float(each.detach().sum()) for each in run.module.parameters()]
    raise AssertionError("the end comes before")


def plain_loop(model: nn.Module, until: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(Points(), 16, shuffle=True, generator=torch.Generator().manual_seed(7), collate_fn=named)
    step = 0
    while True:
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            step += 1
            if step == until:
                return [float(each.detach().sum()) for each in model.parameters()]
