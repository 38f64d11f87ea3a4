"""What ranks do with streams in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lockstep


def number(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(sample["__key__"])])


def walk(run: lockstep.Run, folder: str, stop: int | None = None) -> list[int]:
    """One epoch over tar files, saved and left after so many steps; the numbers of the examples that this rank saw."""
    model = nn.Linear(1, 2)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    run.restore()
    found: list[int] = []
    for _ in run.epochs(1):
        for batch in run.batches(lockstep.TarShards(f"{folder}/*.tar", decode=number), 12):
            run.backward(run.model(batch).mean())
            if run._feed.step is not None and run._feed.step.examples:
                found += [int(each) for each in batch[:, 0]]
            run.step()
            if run.progress.step == stop:
                run.checkpoint()
                return found
    return found
