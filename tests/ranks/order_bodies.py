"""What ranks do in the tests of orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

ORDERS: dict[str, Any] = {
    "weighted": {"type": "weighted", "weights": np.arange(51), "count": 70},
    "buckets": {"type": "buckets", "lengths": np.arange(51) % 7, "window": 3},
    "own": lambda epoch, seed, count: np.roll(np.arange(count), epoch + 1),
}


def numbered(count: int = 51) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float32).reshape(-1, 1))


def walk(run: lockstep.Run, stop_at: int | None = None) -> dict[str, list[list[int]]]:
    """The examples that this rank has of every batch of two epochs, in each of the orders."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    run.restore()
    seen: dict[str, list[list[int]]] = {name: [] for name in ORDERS}
    for _ in run.epochs(2):
        for name, order in ORDERS.items():
            for (batch,) in run.batches(numbered(), 12, order=order, name=name):
                seen[name].append([int(each) for each in batch.flatten()])
                run.backward(run.model(batch).mean())
                run.step()
                if run.progress.step == stop_at:
                    run.checkpoint()
                    return seen
    return seen


def walk_for_a_while(run: lockstep.Run) -> dict[str, list[list[int]]]:
    """Into the midst of the third pass."""
    return walk(run, stop_at=14)


def another_order_each(run: lockstep.Run) -> None:
    draws = np.random.default_rng(run.rank)
    next(run.batches(numbered(), 10, order=lambda epoch, seed, count: draws.permutation(count)))


def other_data_each(run: lockstep.Run) -> None:
    next(run.batches(numbered(51 + run.rank), 10))
