"""What ranks do in tests of float16, on a GPU."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Run


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 16, generator=generator)
    return TensorDataset(inputs, inputs.square().sum(1).sqrt())


class Overflowing(nn.Module):
    """The larger the boost, the smaller the scale at which its gradients fit into float16."""

    def __init__(self, boost: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.boost = boost
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs)).squeeze(-1) * self.boost


def train(
    run: Run,
    steps: int = 16,
    boost: float = 1.0,
    share: float = 1.0,
    kill_at: int = 0,
    precision: str = "fp16",
    accumulate: int = 1,
) -> dict[str, Any]:
    """Train from a checkpoint where there is one, saving every second step; what must be the same at the end."""
    model = Overflowing(boost)
    run.setup(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision=precision, clip_norm=1.0, ema=0.9
    )  # fmt: skip
    run.restore()
    for _ in run.epochs(None):
        for inputs, targets in run.batches(data(), 16, accumulate=accumulate):
            with run.autocast():
                loss = share * nn.functional.mse_loss(run.model(inputs), targets)
            run.backward(loss)
            run.log(loss=loss)
            if not run.step():
                continue
            if run.progress.step % 2 == 0:
                run.checkpoint()
            if run.progress.step == kill_at and run._engine.began_at == 0 and run.rank == run.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.progress.step == steps:
                scale = run._engine.stepper.loss_scale
                averages = [each.state() for each in run._engine.models.averages]
                run._engine.finish()
                skipped = run._engine.aggregator.state_dict()["skips"]
                return {
                    "weights": torch.cat([each.detach().reshape(-1).cpu() for each in _local(run)]).numpy(),
                    "average": [_part(each).numpy(force=True) for one in averages for each in one["weights"].values()],
                    "scale": None if scale is None else scale.state_dict(),
                    "last_skipped": skipped["last"],
                    "loss": run._engine.aggregator.latest.get("loss"),
                    "norm": run._engine.aggregator.latest.get("gradient_norm"),
                }
    raise AssertionError


def _local(run: Run) -> list[Tensor]:
    return [_part(each) for each in run.module.parameters()]


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def half_weights(run: Run) -> None:
    run.setup(nn.Linear(2, 1).half(), precision="fp16")


def compiled(run: Run, mode: str) -> None:
    model = Overflowing(1.0)
    run.setup(model, torch.optim.AdamW(model.parameters()), compile={"mode": mode, "dynamic": False}, ema=0.9)
    run.restore()
    kept = []
    for inputs, targets in run.batches(data(), 16, accumulate=2):
        outputs = run.model(inputs)
        kept.append((outputs.detach(), outputs.detach().clone()))
        run.backward(nn.functional.mse_loss(outputs, targets))
        run.step()
    assert all(torch.equal(one, copy) for one, copy in kept), "what a model returned was written over"
    found = run.evaluate(lambda batch: {"error": (run.module(batch[0]) - batch[1]).abs()}, data(), 16)
    assert found["error"] < 10


def normalised(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for inputs, targets in run.batches(data(), 16):
        run.backward(nn.functional.mse_loss(run.model(inputs).squeeze(-1), targets))
        run.step()
    return model[1].running_mean.numpy(force=True)
