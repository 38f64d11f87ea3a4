"""A task with ramps for tests/ranks/test_ramps_on_ranks.py, and the same training written by hand in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.data.order import Shuffled

COUNT, LENGTH, RATE = 61, 12, 0.5
LENGTHS = [3 + number % 10 for number in range(COUNT)]


class Text(lockstep.Task):
    """Predicts the next of a few letters."""

    def __init__(self, differ: bool = False) -> None:
        self.lengths_differ = differ

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randint(7, (COUNT, LENGTH + 1), generator=torch.Generator().manual_seed(1)))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        (text,) = batch
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def tokens_per_example(self) -> int | list[int]:
        return LENGTHS if self.lengths_differ else LENGTH

    def lengths(self) -> list[int]:
        return LENGTHS

    def cut(self, batch: list[Tensor], length: int) -> list[Tensor]:
        return [batch[0][:, : length + 1]]


class Uncounted(Text):
    tokens_per_example = lockstep.Task.tokens_per_example  # type: ignore[assignment]
    cut = lockstep.Task.cut  # type: ignore[assignment]


class Streamed(Text):
    def train_data(self) -> Any:
        return Stream(super().train_data())


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[each] for each in range(COUNT)])


def batches(size_at: Any, drop_last: bool) -> Iterator[list[int]]:
    """The global batches of a run without end; `size_at` says how large the next one is."""
    order, epoch = Shuffled(COUNT, 0), -1
    left: list[int] = []
    while True:
        size = size_at()
        if not left or (drop_last and len(left) < size):
            epoch += 1
            left = order.at(epoch, torch.arange(COUNT).numpy()).tolist()
        yield left[:size]
        left = left[size:]


def by_hand(
    size: Any, length: Any, task: Text, is_done: Any, drop_last: bool = False, rate: Any = None
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """Trains in plain torch. Returns the weights, and the tokens after every step.

    `size`, `length` and `is_done` are functions of steps and tokens done; `rate` of tokens before and after a step.
    """
    model, (data,) = task.model(), task.train_data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    step = tokens = 0
    after: dict[int, int] = {}
    counts = LENGTHS if task.lengths_differ else [LENGTH] * COUNT
    walk = batches(lambda: size(step, tokens), drop_last)
    while not is_done(step, tokens):
        chosen = next(walk)
        longest = length(step, tokens)
        more = sum(min(counts[each], longest) for each in chosen)
        if rate is not None:
            optimizer.param_groups[0]["lr"] = RATE * rate(tokens, tokens + more)
        loss = task.loss(model, task.cut([data[chosen]], longest))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, tokens = step + 1, tokens + more
        after[step] = tokens
    return model.state_dict(), after


def cosine(warmup: int, total: int, final: float) -> Any:
    """The rate by the tokens before and after a step."""

    def at(before: int, after: int) -> float:
        if before < warmup:
            return min(after / warmup, 1.0)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min((before - warmup) / (total - warmup), 1.0)))

    return at
