"""MNIST: 28 by 28 pixel digits, from the published idx files or from a synthetic set of the same shape.

lockstep train examples/mnist.yaml                      as a task
PJRT_DEVICE=CPU python examples/mnist.py --fake_data    as a program; with --ddp on several processes
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from idx import read_labelled_images
from program import options, run_program
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of the 60,000 training images, scaled to [0, 1]


class MnistNet(nn.Module):
    """Takes the images as bytes: a quarter of the memory and of the copying that floats would need."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = (images.unsqueeze(1).float() / 255 - PIXEL_MEAN) / PIXEL_STD
        features = F.max_pool2d(F.relu(self.conv1(features)), 2)
        features = F.max_pool2d(F.relu(self.conv2(features)), 2)
        return self.fc2(F.relu(self.fc1(features.flatten(1))))


def make_fake_images(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """A learnable stand-in: a blurred pattern per class, moved about and covered with noise."""
    # The patterns have a seed of their own, so that sets made with different seeds share the ten classes.
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=(28, 28), mode="bilinear").squeeze(1)

    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (examples,), generator=generator)
    shifts = torch.randint(-3, 4, (examples, 2), generator=generator)
    # Row r of a moved image is row r - shift of the pattern, modulo 28; columns likewise.
    rows = (torch.arange(28) - shifts[:, :1]) % 28
    columns = (torch.arange(28) - shifts[:, 1:]) % 28
    moved = patterns[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
    noisy = moved + 0.3 * torch.randn(moved.shape, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8), labels


class Mnist(lockstep.Task):
    """Reads the four idx files in `folder`, or with `fake_data` makes up as many `examples` as asked."""

    def __init__(self, folder: str | None = None, fake_data: bool = False, examples: int = 4096) -> None:
        if (folder is None) != fake_data:
            raise ValueError("Mnist needs either folder: <where the idx files are> or fake_data: true")
        self.folder = folder
        self.examples = examples

    def model(self) -> nn.Module:
        return MnistNet()

    def train_data(self) -> Dataset[Any]:
        return self._dataset("train", fake_examples=self.examples, fake_seed=1)

    def val_data(self) -> Dataset[Any]:
        return self._dataset("t10k", fake_examples=self.examples // 4, fake_seed=2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def shard_rules(self) -> dict[str, Any]:
        """Over an axis `model`, where the mesh has one: the hidden layer's outputs, and what reads them."""
        return {"fc1.weight": ["model", None], "fc2.weight": [None, "model"]}

    def evaluate_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(dim=1) == labels).float(),
        }

    def _dataset(self, part: str, fake_examples: int, fake_seed: int) -> TensorDataset:
        if self.folder is None:
            images, labels = make_fake_images(fake_examples, fake_seed)
        else:
            try:
                images, labels = read_labelled_images(Path(self.folder), part)
            except (OSError, ValueError) as error:
                raise lockstep.ConfigError(str(error)) from None
        return TensorDataset(images, labels.long())


def main() -> None:
    parser = options("Trains a small convolutional network on MNIST.", batch_size=128, examples=4096, lr=0.01)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--fake_data", action="store_true", help="made-up images of the same shape")
    source.add_argument("--datadir", metavar="FOLDER", help="where the idx files are")
    chosen = parser.parse_args()
    run_program(Mnist(chosen.datadir, chosen.fake_data, chosen.examples), chosen)


if __name__ == "__main__":
    main()
