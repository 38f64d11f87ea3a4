"""Handwritten digits, 8 by 8 pixels: the smallest real task. The 1,797 images come with scikit-learn."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class DigitNet(nn.Module):
    """Two convolutions and a hidden layer; no dropout, so the number of ranks changes nothing."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.conv2(F.relu(self.conv1(images))))
        features = F.max_pool2d(features, 2).flatten(1)
        return self.fc2(F.relu(self.fc1(features)))


def load_digits() -> TensorDataset:
    """All images, scaled to [0, 1] and shaped [1, 8, 8], with their labels."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "The digits example reads its images from scikit-learn, which is not installed. "
            "Install it with: pip install scikit-learn"
        ) from error
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target))


class Digits(lockstep.Task):
    """The split into training and validation examples is made by `data.split` in the YAML."""

    def __init__(self, hidden: int = 128) -> None:
        self.hidden = hidden

    def model(self) -> nn.Module:
        return DigitNet(self.hidden)

    def train_data(self) -> Dataset[Any]:
        return load_digits()

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
