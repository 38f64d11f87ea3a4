"""CLIP: two encoders, and a loss over all pairs of the global batch, whose negatives are on other ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale.exp()


class Clip(lockstep.Task):
    def model(self) -> nn.Module:
        return Encoders()

    def train_data(self) -> Dataset:
        meaning = torch.randn(640, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(meaning.repeat(1, 3), meaning.repeat(1, 2)[:, :6])

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        images, texts, scale = run.model(*batch)
        all_images, all_texts = run.all_gather(images), run.all_gather(texts)  # gradients flow back to their ranks
        before = run.all_gather(torch.tensor([len(images)], device=images.device))[: run.dp_rank].sum()
        mine = before + torch.arange(len(images), device=images.device)  # where the own pairs are in the whole batch
        loss = (
            F.cross_entropy(scale * images @ all_texts.T, mine) + F.cross_entropy(scale * texts @ all_images.T, mine)
        ) / 2
        run.backward(loss)
        run.step()
        return {"loss": loss}
