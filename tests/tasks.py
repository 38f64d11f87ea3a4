"""Small tasks that tests train: quick to compute, hard to get right by accident, and able to fail on purpose."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Tiny(lockstep.Task):
    """Classify points by a fixed random teacher. `fail_at` makes one rank misbehave at one training step."""

    def __init__(
        self,
        examples: int = 100,
        dropout: float = 0.0,
        tied: bool = False,
        batch_norm: bool = False,
        sleep: float = 0.0,
        fail_at: dict[str, Any] | None = None,
    ) -> None:
        self.examples, self.dropout, self.tied, self.batch_norm, self.sleep = examples, dropout, tied, batch_norm, sleep
        self.fail_at = fail_at or {}
        self.calls = 0

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, 16)]
        if self.batch_norm:
            layers.append(nn.BatchNorm1d(16))
        layers += [nn.ReLU(), nn.Linear(16, 4)]
        if self.tied:
            layers.insert(4, nn.Linear(16, 16))
            layers[4].weight = layers[3].weight  # type: ignore[union-attr]
        return nn.Sequential(*layers)

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.examples, 8, generator=generator)
        teacher = torch.randn(8, 4, generator=generator)
        return TensorDataset(inputs, (inputs @ teacher).argmax(1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if model.training:
            self.calls += 1
            self._misbehave()
            time.sleep(self.sleep)
        inputs, labels = batch
        loss = F.cross_entropy(model(inputs), labels)
        return loss * float("nan") if self._now("nan") and model.training else loss

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}

    def _now(self, how: str) -> bool:
        here = self.fail_at.get("rank", 0) == int(os.environ.get("RANK", "0"))
        return here and self.fail_at.get("how") == how and self.calls == self.fail_at.get("step")

    def _misbehave(self) -> None:
        once = self.fail_at.get("once")
        if once and Path(once).exists():
            return
        if self._now("exception"):
            if once:
                Path(once).touch()
            raise ValueError("this example cannot be right")
        if self._now("kill"):
            if once:
                Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._now("leave"):
            os._exit(0)
        if self._now("hang"):
            if once:
                Path(once).touch()
            time.sleep(3600)
        if self._now("fill"):
            with contextlib.suppress(OSError), Path(self.fail_at["file"]).open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))
        if self._now("wait"):
            while not Path(self.fail_at["until"]).exists():
                time.sleep(0.05)


class Block(nn.Module):
    """A residual layer with all that a second pass could get wrong: dropout, and statistics that move."""

    def __init__(self, width: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.out(F.gelu(self.inner(self.norm(x)))))


class Stacked(Tiny):
    """The same teacher, learned by a stack of blocks."""

    def __init__(self, layers: int = 3, width: int = 8, **rest: Any) -> None:
        super().__init__(**rest)
        self.layers, self.width = layers, width

    def model(self) -> nn.Module:
        blocks = nn.Sequential(*(Block(self.width, self.dropout, self.batch_norm) for _ in range(self.layers)))
        return nn.Sequential(nn.Linear(8, self.width), blocks, nn.Linear(self.width, 4))


class Hungry(Tiny):
    """Computes every example so many times over: memory for as little as one likes, or for as much."""

    def __init__(self, times: int = 1, **rest: Any) -> None:
        super().__init__(**rest)
        self.times = times

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if self.fail_at.get("how") == "memory" and self.fail_at["rank"] == int(os.environ.get("RANK", "0")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 14.58 GiB in all")
        return super().loss(model, [each.repeat_interleave(self.times, 0) for each in batch])


class Pruned(Tiny):
    """Some judge of trials, that only rank 0 can ask, has had enough after the second validation."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.asked = 0

    def should_stop(self, metrics: dict[str, float]) -> str | None:
        assert os.environ.get("RANK", "0") == "0" and "val/loss" in metrics
        self.asked += 1
        return "pruned" if self.asked == 2 else None


class NoLoss(lockstep.Task):
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.zeros(4, 1))


class Empty(Tiny):
    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.zeros(0, 8), torch.zeros(0))


class Recording(Tiny):
    """Writes down which examples each rank saw in training, in order."""

    def __init__(self, record: str = "", **rest: Any) -> None:
        super().__init__(**rest)
        self.record = record

    def train_data(self) -> Dataset[Any]:
        inputs, labels = super().train_data().tensors  # type: ignore[attr-defined]
        return TensorDataset(inputs, labels, torch.arange(len(inputs)))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, labels, numbers = batch
        if model.training:
            with Path(f"{self.record}-{os.environ.get('RANK', '0')}").open("a") as stream:
                stream.write(" ".join(map(str, numbers.tolist())) + "\n")
        return super().loss(model, [inputs, labels])

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return super().metrics(model, batch[:2])


class Augmented(Tiny):
    """Random noise in __getitem__, by each of the generators that people use: only right if seeded by place."""

    def train_data(self) -> Dataset[Any]:
        return _Noisy(super().train_data())


class _Noisy(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._inner[index]
        return inputs + 0.1 * (torch.randn(8) + random.random() + float(np.random.randn())), label


class SummedLoss(Tiny):
    """A mistake that one process does not notice: the sum over the batch at hand instead of its mean."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return super().loss(model, batch) * len(batch[0])


class TokenMean(Tiny):
    """A mean over the labels that are not -100, of which ranks have different numbers."""

    def __init__(self, mended: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self.mended = mended

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Any:
        labels = batch[1].masked_fill(batch[0][:, 0] > 0, -100)
        loss = F.cross_entropy(model(batch[0]), labels)
        count = (labels != -100).sum()
        return lockstep.Mean(loss * count, count) if self.mended else loss


class WrongReduction(Tiny):
    """Forward passes are right; of what several ranks found, the first one's counts too much."""

    def model(self) -> nn.Module:
        model = super().model()
        scale = 1.5 if os.environ.get("RANK", "0") == "0" and os.environ.get("WORLD_SIZE", "1") != "1" else 1.0
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * scale)
        return model


class Padded(lockstep.Task):
    """Sentences of 1 to 7 tokens, padded: the loss and the accuracy are means over real tokens."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 11, (100, 7), generator=generator)
        lengths = torch.randint(1, 8, (100,), generator=generator)
        return TensorDataset(tokens, (torch.arange(7) < lengths[:, None]).float())

    def loss(self, model: nn.Module, batch: list[Tensor]) -> lockstep.Mean:
        tokens, mask = batch
        each = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
        return lockstep.Mean((each * mask.flatten()).sum(), mask.sum())

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        tokens, mask = batch
        right = (model(tokens).argmax(2) == tokens).float() * mask
        return {"accuracy": lockstep.Mean(right.sum(), mask.sum())}


class TwoModels(Tiny):
    """Two models with an optimizer each, one learning from the other; a training step of its own."""

    def model(self) -> dict[str, nn.Module]:  # type: ignore[override]
        return {"body": nn.Sequential(nn.Linear(8, 16), nn.ReLU()), "head": nn.Linear(16, 4)}

    def optimizer(self, model: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
        return {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in model.items()}

    def training_step(self, run: lockstep.Run, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        body, head = run.models["body"], run.models["head"]
        features = body(inputs)
        with run.frozen(head):
            first = F.cross_entropy(head(features), labels)
            run.backward(first)
        second = F.cross_entropy(head(features.detach()), labels)
        run.step(run.optimizers["body"])
        run.backward(second)
        run.step(run.optimizers["head"])
        return {"loss": first, "second": second}

    def loss(self, model: Any, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model["head"](model["body"](inputs)), labels)

    def metrics(self, model: Any, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": (model["head"](model["body"](inputs)).argmax(1) == labels).float()}
