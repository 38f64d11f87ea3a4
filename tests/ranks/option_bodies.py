"""What ranks do in tests of the options that a config has by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Run


class Wide(nn.Module):
    """Large enough for several buckets of a megabyte, with BatchNorm, and a part that nobody uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.second = nn.Linear(16, 512), nn.BatchNorm1d(512), nn.Linear(512, 700)
        self.head = nn.Linear(700, 1)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        return self.head(torch.relu(self.second(hidden))).squeeze(-1)


def data(examples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(examples, 16, generator=generator)
    return TensorDataset(inputs, inputs.square().sum(1).sqrt())


def train(
    run: Run, accumulate: int = 1, steps: int = 6, unused: bool = False, save_at: int = 0, **how: Any
) -> dict[str, Any]:
    """Train, from a checkpoint where there is one; the weights, buffers and losses at the end."""
    model = Wide(unused)
    model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), **how)
    run.restore()
    for _ in run.epochs(None):
        for inputs, targets in run.batches(data(), 16, accumulate=accumulate):
            with run.autocast():
                loss = nn.functional.mse_loss(model(inputs), targets)
            run.backward(loss)
            run.log(loss=loss)
            if run.step():
                if run.progress.step == save_at:
                    run.checkpoint()
                if run.progress.step == steps:
                    return found(run)
    raise AssertionError("the loop ended before its last step")


def found(run: Run) -> dict[str, Any]:
    """As arrays: tensors would be shared with a process that is gone by then."""
    run._engine.finish()
    return {name: each.numpy(force=True) for name, each in run.module.state_dict().items()}


def averaged(run: Run) -> dict[str, Any]:
    """Train with an average of the weights; what it comes to on the data, beside the weights themselves."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05), ema={"decay": 0.8, "every": "2 steps"})
    run.restore()
    for _ in run.epochs(2):
        for inputs, targets in run.batches(data(), 16):
            run.backward(nn.functional.mse_loss(run.model(inputs).squeeze(-1), targets))
            run.step()
    found = run._engine.evaluate_or_leave(
        lambda batch: {"error": (run.module(batch[0]).squeeze(-1) - batch[1]).abs()}, {"val": data()}, 16, "all", None
    )
    return (found or {})["val"]


def plain_sum(state: None, bucket: Any) -> Any:
    """A hook of one's own: what DDP does without any."""
    exchanged = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return exchanged.then(lambda future: future.value()[0].div_(dist.get_world_size()))
