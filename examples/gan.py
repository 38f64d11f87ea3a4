"""A generative adversarial network on the digits: two models, two optimizers, one training step of the task's own."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Gan(lockstep.Task):
    def __init__(self, latent: int = 16, hidden: int = 128, lr: float = 2e-4) -> None:
        self.latent, self.hidden, self.lr = latent, hidden, lr

    def model(self) -> Mapping[str, nn.Module]:
        hidden = self.hidden
        return {
            "generator": nn.Sequential(
                nn.Linear(self.latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64),
                nn.Tanh(),
            ),
            "discriminator": nn.Sequential(
                nn.Linear(64, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
                nn.Linear(hidden, 1),
            ),
        }  # fmt: skip

    def optimizer(self, models: Mapping[str, nn.Module]) -> Mapping[str, Optimizer]:
        return {name: Adam(each.parameters(), lr=self.lr, betas=(0.5, 0.999)) for name, each in models.items()}

    def train_data(self) -> Dataset[Any]:
        # Every image brings its noise along: what is drawn in a step would differ from rank to rank.
        images = load_digits().tensors[0].flatten(1) * 2 - 1
        noise = torch.randn(len(images), self.latent, generator=torch.Generator().manual_seed(0))
        return TensorDataset(images, noise)

    def training_step(self, run: lockstep.Run, batch: Any) -> Mapping[str, Tensor]:
        generator, discriminator = run.models["generator"], run.models["discriminator"]
        real, noise = batch
        noise = noise.roll(run.progress.epoch, dims=1)  # other images from the same noise in every epoch
        made = generator(noise)

        with run.frozen(discriminator):  # it judges here, and learns below
            fooled = judged(discriminator(made), real=True)
            run.backward(fooled)
        run.step(run.optimizers["generator"])

        told_apart = (judged(discriminator(real), real=True) + judged(discriminator(made.detach()), real=False)) / 2
        run.backward(told_apart)
        run.step(run.optimizers["discriminator"])
        return {"generator": fooled, "discriminator": told_apart}

    def metrics(self, models: Mapping[str, nn.Module], batch: Any) -> dict[str, Tensor]:
        real, noise = batch
        discriminator = models["discriminator"]
        return {
            "real_taken_for_real": (discriminator(real) > 0).float().squeeze(1),
            "made_taken_for_real": (discriminator(models["generator"](noise)) > 0).float().squeeze(1),
        }


def judged(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))
