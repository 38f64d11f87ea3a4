"""Truncated back-propagation through time: the state of each text is carried from batch to batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

TEXTS, PIECES, LENGTH = 32, 20, 16


class Pieces(Dataset):
    """Piece k of all texts, then piece k + 1: with a batch size of TEXTS, a rank has the same texts in every batch."""

    def __init__(self) -> None:
        self.texts = torch.randint(10, (TEXTS, PIECES * LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return TEXTS * PIECES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece, text = divmod(index, TEXTS)
        begin = piece * LENGTH
        return self.texts[text, begin : begin + LENGTH], self.texts[text, begin + 1 : begin + LENGTH + 1]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(10, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.lstm(self.embed(tokens), state)
        return self.head(hidden), state


class CarriedState(lockstep.Task):
    def __init__(self) -> None:
        self.state: tuple[Tensor, ...] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = saved["state"]

    def model(self) -> nn.Module:
        return Network()

    def train_data(self) -> Dataset:
        return Pieces()

    def order(self, epoch: int, seed: int, count: int) -> range:
        return range(count)

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        tokens, targets = batch
        outputs, state = run.model(tokens, self.state)
        loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        run.backward(loss)
        run.step()
        self.state = tuple(each.detach() for each in state)  # gradients end here, what was read stays
        return {"loss": loss}

    def callbacks(self) -> list[lockstep.Callback]:
        return [Carried(self)]


class Carried(lockstep.Callback):
    """Saves what is carried, and drops it where the texts begin again. Ranks have different texts: each has its own."""

    def __init__(self, task: CarriedState) -> None:
        self.task = task

    def before_training(self, run: lockstep.Run) -> None:
        run.register_state("carried", self.task)

    def after_epoch(self, run: lockstep.Run) -> None:
        self.task.state = None
