"""Loops of tests/ranks/test_finished_gradients.py, which look at finished gradients and change them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Mean, Run

STEPS, BATCH, MOST = 5, 12, 0.02


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(STEPS * BATCH, 6, generator=generator), torch.randint(-1, 4, (STEPS * BATCH,), generator=generator)
    )


def by_hand() -> tuple[list[float], list[float]]:
    """Plain PyTorch: the weights after gradients were clipped by value, and the norm of one before."""
    model, (inputs, labels) = network(), data().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for number in range(STEPS):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), labels[rows], ignore_index=-1).backward()
        norms.append(float(model.get_submodule("0").weight.grad.norm()))
        nn.utils.clip_grad_value_(model.parameters(), MOST)
        optimizer.step()
    return [float(each.detach().sum()) for each in model.parameters()], norms


def loss_of(model: nn.Module, batch: Any) -> Mean:
    inputs, labels = batch
    return Mean(F.cross_entropy(model(inputs), labels, ignore_index=-1, reduction="sum"), (labels >= 0).sum())


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clipped(run: Run, accumulate: int) -> tuple[list[float], list[float]]:
    plain, norms = network(), []
    model, optimizer = run.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    for batch in run.batches(data(), BATCH, shuffle=False, accumulate=accumulate):
        run.backward(loss_of(model, batch))
        found = run.gradients()
        assert bool(found) == run.completes_batch
        if found:
            norms.append(float(whole(found["0.weight"].norm())))
            for gradient in found.values():
                gradient.clamp_(-MOST, MOST)
            assert run.gradients().keys() == found.keys()  # once more changes nothing
        run.step(optimizer)
    return [float(whole(each.detach()).sum()) for each in run.module.parameters()], norms


def after_gradients(run: Run) -> None:
    plain = network()
    model, _ = run.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    for batch in run.batches(data(), BATCH):
        run.backward(loss_of(model, batch))
        run.gradients()
        run.backward(loss_of(model, batch))


def dropped(run: Run) -> list[int]:
    """Leaves a batch out after a look at its gradients; asks for them where there are none, and in a closure."""
    plain = network()
    model, optimizer = run.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    found = []
    for number, batch in enumerate(run.batches(data(), BATCH, shuffle=False)):
        run.backward(loss_of(model, batch))
        found.append(len(run.gradients()))
        if number == 1:
            optimizer.zero_grad()
            continue
        run.step(optimizer)
        found.append(len(run.gradients()))
    return [*found, run.progress.step]


def in_a_closure(run: Run) -> None:
    plain = network()
    model, optimizer = run.setup(plain, torch.optim.LBFGS(plain.parameters(), max_iter=2))

    def closure() -> Any:
        loss = loss_of(model, batch)
        run.backward(loss)
        run.gradients()
        return loss

    for batch in run.batches(data(), BATCH):  # noqa: B007  the closure takes it
        run.step(optimizer, closure)


class Clipping(lockstep.Callback):
    """Clips by value, adds noise, and writes down when it was called."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.called: list[str] = []

    def before_batch(self, run: Run, batch: Any) -> None:
        self.called.append(f"before {len(batch[0])}")

    def after_batch(self, run: Run, batch: Any) -> None:
        self.called.append(f"after {len(batch[0])}")

    def before_optimizer_step(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.called.append("step")
        for gradient in run.gradients(optimizer).values():
            gradient.clamp_(-MOST, MOST)
            gradient += self.noise * torch.randn_like(gradient)

    def after_exception(self, run: Run, error: Exception) -> None:
        (run.folder / f"failed-{run.rank}").write_text(f"{error} at step {run.progress.step}")

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        weights = [float(each.detach().sum()) for each in run.module.parameters()]
        (run.folder / f"callback-{run.rank}").write_text(repr((weights, self.called)))


class Anomaly(lockstep.Callback):
    def before_batch(self, run: Run, batch: Any) -> None:
        torch.autograd.set_detect_anomaly(run.progress.step == 2)


class Rooted(lockstep.Task):
    """In its third step a gradient is not finite, though the loss is."""

    def model(self) -> nn.Module:
        return network()

    def train_data(self) -> TensorDataset:
        return data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        outputs = model(batch[0]).square().mean()
        return outputs + (outputs * 0).sqrt() if self.calls == 3 else outputs  # the root of zero has no slope

    def callbacks(self) -> list[Any]:
        return [Anomaly()]


class Small(lockstep.Task):
    def __init__(self, noise: float = 0.0, fails_at: int = -1) -> None:
        self._callback, self._fails_at, self._calls = Clipping(noise), fails_at, 0

    def model(self) -> nn.Module:
        return network()

    def train_data(self) -> TensorDataset:
        return data()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss(self, model: nn.Module, batch: Any) -> Mean:
        self._calls += 1
        if self._calls == self._fails_at:
            raise ValueError("no good")
        return loss_of(model, batch)

    def callbacks(self) -> list[Any]:
        return [self._callback]
