"""A task with all that is measured of whole sets, and hooks, for tests on several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

CLASSES = 4


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    teacher = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(1))
    noise = 2 * torch.randn(count, CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher + noise).argmax(1))


class Measured(lockstep.Task):
    """Sets that ranks do not divide: of the last batch of `few` some have no example."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def train_data(self) -> Dataset[Any]:
        return points(60, 2)

    def val_data(self) -> dict[str, Dataset[Any]]:
        return {name: points(count, 3) for name, count in (("many", 47), ("few", 11))}

    def test_data(self) -> Dataset[Any]:
        return points(29, 4)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Any:
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return loss, {"norm": logits.norm(dim=1).mean(), "first": lockstep.Mean(batch[0][:, 0].sum(), len(batch[0]))}

    def outputs(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"preds": model(batch[0]), "target": batch[1]}

    def torchmetrics(self) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score
        from torchmetrics.text import Perplexity

        return {
            "f1": MulticlassF1Score(CLASSES, average="macro"),
            "auroc": MulticlassAUROC(CLASSES),
            "confusion": MulticlassConfusionMatrix(CLASSES),
            "perplexity": Perplexity(),
        }

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        super().update_metrics({name: each for name, each in metrics.items() if name != "perplexity"}, outputs)
        # Of texts of one token.
        metrics["perplexity"].update(outputs["preds"][:, None], outputs["target"][:, None])

    def epoch_metrics(self, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
        right = outputs["target"] == 0
        pairs = outputs["preds"][right, :1] - outputs["preds"][~right, 0]  # how often a right one has the higher score
        return {"auc": (pairs > 0).double().mean(), "order": outputs["preds"][:, 0]}


class StopOnLast:
    """The last rank alone has enough, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: lockstep.Run) -> str | None:
        last = run.rank == run.world_size - 1
        return f"rank {run.rank} has enough" if last and run.progress.step == self.step else None


class Average:
    """An average of the weights so far, as a hook keeps it; what it ends with is written down."""

    def __init__(self, file: str) -> None:
        self.file, self.steps = file, 0
        self.average: dict[str, Tensor] = {}

    def after_step(self, run: lockstep.Run) -> None:
        self.steps += 1
        for name, value in run.module.state_dict().items():
            before = self.average.get(name, torch.zeros_like(value))
            self.average[name] = 0.9 * before + 0.1 * value

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.average = state["steps"], state["average"]

    def after_training(self, run: lockstep.Run, metrics: dict[str, Any]) -> None:
        told = {"steps": self.steps, **{name: each.tolist() for name, each in self.average.items()}}
        ranks = run.gather(told, "the averages of all ranks")
        if run.is_main:
            Path(self.file).write_text(json.dumps(ranks))


class FailOnOne:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def after_epoch(self, run: lockstep.Run) -> None:
        if run.rank == self.rank:
            raise ZeroDivisionError("nothing to divide by")
