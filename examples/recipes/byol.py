"""BYOL: two views of an image, and a teacher that is a moving average of the student."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep


class Views(Dataset):
    """Noise in place of crops and colours, drawn per example."""

    def __init__(self) -> None:
        self.images = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image + 0.1 * torch.randn(16), image + 0.1 * torch.randn(16)


class Byol(lockstep.Task):
    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay

    def model(self) -> dict[str, nn.Module]:
        student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        teacher = copy.deepcopy(student).requires_grad_(False)
        return {"student": nn.Sequential(student, nn.Linear(8, 8)), "teacher": teacher}

    def train_data(self) -> Dataset:
        return Views()

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        first, second = batch
        with torch.no_grad():
            targets = [run.models["teacher"](each) for each in (second, first)]
        guesses = run.models["student"](torch.cat([first, second])).chunk(2)
        loss = sum(1 - F.cosine_similarity(*pair).mean() for pair in zip(guesses, targets, strict=True)) / 2
        run.backward(loss)
        if run.step():
            with torch.no_grad():  # the same on every rank, since their students are
                student, teacher = run.modules["student"][0], run.modules["teacher"]
                for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(its, 1 - self.decay)
        return {"loss": loss}
