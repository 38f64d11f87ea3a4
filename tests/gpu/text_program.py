"""Trains the GPT of the examples, on ranks that share one GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import lockstep
from conftest import ROOT

sys.path.append(str(ROOT / "examples"))


def train(
    run: lockstep.Run, precision: str, length: int = 256, steps: int = 12, layers: int = 3, dropout: float = 0.0,
    fused: bool | None = None, stop: int = 0,
) -> dict[str, Any]:  # fmt: skip
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(vocab=256, context=length, layers=layers, heads=4, width=256)
    for block in model.blocks:
        block.out.register_forward_hook(lambda _, __, x: F.dropout(x, dropout) if dropout else x)
    model, optimizer = run.setup(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), precision=precision, clip_norm=1.0
    )
    run.restore()
    tokens = torch.randint(256, (4 * steps, length + 1), generator=torch.Generator().manual_seed(1))
    losses = []
    for (batch,) in run.batches(TensorDataset(tokens), 4):
        with run.autocast():
            loss = model(batch[:, :-1], batch[:, 1:]).mean()
        run.backward(loss)
        run.step(optimizer)
        losses.append(loss.detach())
        if run.progress.step == stop:
            run.checkpoint()
            break
    return {"losses": torch.stack(losses).tolist(), "peak": torch.cuda.max_memory_allocated()}
