"""DDPM: a network predicts the noise in an image; each example brings its noise and its time step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

STEPS = 100
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0)  # how much of the image is left at a time step


class Noisy(Dataset):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image = torch.sin(torch.arange(16) * (1 + index % 4) / 4)
        return image, torch.randn(16), torch.randint(STEPS, ())


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, 32)
        self.first, self.last = nn.Linear(16, 32), nn.Sequential(nn.SiLU(), nn.Linear(32, 16))

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        return self.last(self.first(image) + self.time(time))


class Ddpm(lockstep.Task):
    def model(self) -> nn.Module:
        return Denoiser()

    def train_data(self) -> Dataset:
        return Noisy()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        image, noise, time = batch
        kept = KEPT.to(image.device)[time].unsqueeze(1)
        return (model(kept.sqrt() * image + (1 - kept).sqrt() * noise, time) - noise).square().mean()
