"""Models that are stacks of blocks, and how tests train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.run import Run
from tasks import Block

Runs = Callable[..., Run]
DATA = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)))


class Stack(nn.Module):
    """Blocks of which one has a spectral norm: what it computes by moves with every pass."""

    def __init__(self, dropout: float = 0.3, batch_norm: bool = True, spectral: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, dropout, batch_norm) for _ in range(3))
        if spectral:
            nn.utils.parametrizations.spectral_norm(self.blocks[1].inner)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.head(x)  # type: ignore[no-any-return]


def train(run: Run, model: nn.Module, steps: int = 5, accumulate: int = 1, **settings: Any) -> list[float]:
    run.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05), clip_norm=1.0, **settings)
    losses = []
    for _ in run.epochs(None):
        for (batch,) in run.batches(DATA, 8, accumulate=accumulate):
            with run.autocast():
                loss = run.model(batch).float().square().mean()
            run.backward(loss)
            losses.append(loss.item())
            if run.step() and run.progress.step == steps:
                return losses
    return losses


def fresh(kind: Callable[..., nn.Module] = Stack, **rest: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**rest)
