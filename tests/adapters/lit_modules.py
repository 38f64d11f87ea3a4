"""LightningModules of four shapes, small: an autoencoder, a GAN, a classifier and a transformer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ByEpoch(Sampler[int]):
    """Another order in every epoch, which depends on nothing but the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(60, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Digits(lightning.LightningDataModule):
    """Points of three classes; an odd number of validation examples."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(90, 6, generator=generator)
        labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(1)
        self.train, self.val = TensorDataset(inputs[:60], labels[:60]), TensorDataset(inputs[60:83], labels[60:83])
        self.test = TensorDataset(inputs[83:], labels[83:])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, sampler=ByEpoch())

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 7)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, 4)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.test, 4)


class Recorded(lightning.LightningModule):
    """Keeps the losses of every step, and can end its process once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.losses: list[float] = []
        self.die_at: int | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.die_at is not None and self.trainer.global_step == self.die_at:
            os.kill(os.getpid(), signal.SIGTERM)


class AutoEncoder(Recorded):
    """Automatic optimization, hyperparameters, one loss for all data."""

    def __init__(self, width: int = 4, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.decoder = nn.Linear(width, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs))

    def _step(self, batch: Any, kind: str) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log(f"{kind}_loss", loss, on_step=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Gan(Recorded):
    """Manual optimization with two optimizers that are stepped in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> None:
        real, (first, second) = batch[0], self.optimizers()
        noise = real.flip(1) * 0.5
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.toggle_optimizer(first)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        first.zero_grad()
        self.manual_backward(g_loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.discriminator(self.generator(noise).detach())
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = (d_loss + F.binary_cross_entropy_with_logits(fake, zeros)) / 2
        second.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})
        self.lr_schedulers().step()
        self.both = torch.stack([g_loss.detach(), d_loss.detach()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end({"loss": self.both.sum()}, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.discriminator.parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.97)]


class Classifier(Recorded):
    """Metrics of torchmetrics, a scheduler that monitors, values of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)
        self.seen: list[int] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        return {"loss": loss, "scores": scores.detach()}

    def on_validation_epoch_start(self) -> None:
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.accuracy(scores, batch[1])
        self.auroc.update(scores, batch[1])
        self.seen.append(len(batch[1]))
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(scores, batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_auroc", self.auroc.compute())
        self.auroc.reset()

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Transformer(Recorded):
    """A warm-up by step, clipping, batches that are added up, an optimizer step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.out(self.layer(self.into(batch[0][:, :, None])).mean(1))
        loss = F.cross_entropy(scores, batch[1])
        self.log("train/loss", loss, batch_size=len(batch[1]))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("before step")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


SHAPES: dict[type[Recorded], dict[str, Any]] = {
    AutoEncoder: {},
    Gan: {},
    Classifier: {},
    Transformer: {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
}
