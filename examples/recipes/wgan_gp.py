"""WGAN-GP: a critic with a gradient penalty, and a generator that learns from every fifth batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import Dataset

import lockstep


class Ring(Dataset):
    """Points on a ring with the random numbers of a step: drawn here, they are the same on any number of ranks."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        angle = torch.tensor(index * 0.1)
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(8), torch.rand(1)


class Wgan(lockstep.Task):
    def model(self) -> dict[str, nn.Module]:
        return {
            "generator": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
            "critic": nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)),
        }

    def optimizer(self, models: Any) -> dict[str, Adam]:
        return {name: Adam(each.parameters(), lr=1e-3, betas=(0.0, 0.9)) for name, each in models.items()}

    def train_data(self) -> Dataset:
        return Ring()

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        generator, critic = run.models["generator"], run.models["critic"]
        real, noise, mixing = batch
        generator_learns = run.progress.step % 5 == 4
        with torch.no_grad():
            made = generator(noise)
        mixed = (mixing * real + (1 - mixing) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(made).mean() - critic(real).mean() + 10 * penalty
        run.backward(loss)
        run.step(run.optimizers["critic"])
        if generator_learns:
            with run.frozen(critic):
                run.backward(-critic(generator(noise)).mean())
            run.step(run.optimizers["generator"])
        return {"critic": loss, "penalty": penalty}
