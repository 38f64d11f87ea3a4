"""Training loops of tests/ranks/test_exact.py: whatever a loop may do whose numbers must not depend on the ranks."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import CombinedOptimizer, Mean, Run


class Net(nn.Module):
    """Dropout, batch statistics, noise by the latent, and a part that only some leaves use."""

    def __init__(self, norm: bool, sometimes: bool, noise: bool) -> None:
        super().__init__()
        self._noise = 0.2 if noise else 0.0
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 3)
        self.norm = nn.BatchNorm1d(24) if norm else nn.LayerNorm(24)
        self.rare = nn.Linear(24, 24)
        self._sometimes = sometimes

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.norm(self.first(inputs))), self._noise, self.training)
        if self._sometimes and float(inputs[0, 0]) > 0.3:
            hidden = hidden + self.rare(hidden)
        return self.last(hidden + self._noise * torch.randn_like(hidden) * random.random())


def data(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 12, generator=generator), torch.randint(-1, 3, (count,), generator=generator)
    )


def settings_of(seed: int) -> dict[str, Any]:
    """How a loop is: the same for a seed on any number of ranks."""
    choose = random.Random(seed)
    norm = choose.random() < 0.4
    return {
        "norm": norm,
        "sometimes": choose.random() < 0.5,
        "tokens": choose.random() < 0.5,
        "accumulate": 1 if norm else choose.choice([1, 1, 2]),
        "clip_norm": choose.choice([None, 0.5]),
        "ema": choose.choice([None, 0.9]),
        "batch_size": 32 if norm else choose.choice([32, 24, 19, 5]),
        "drop_last": norm,
        "two": choose.random() < 0.3,
        "optimizer": choose.choice(["AdamW", "SGD", "Muon"]),
        "zero_grad": choose.choice(["never", "before", "after"]),
        "late": choose.choice(
            [None, None, "a second loss", "cleared", "the model cleared", "no loss", "a hook", "channels last"]
        ),
        "break": choose.random() < 0.3,
    }


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind != "Muon":
        return getattr(torch.optim, kind)(net.parameters(), lr=0.01)  # type: ignore[no-any-return]
    matrices, others = ([each for each in net.parameters() if (each.dim() == 2) is wanted] for wanted in (True, False))
    return CombinedOptimizer(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))


def outputs_of(models: dict[str, Any], inputs: Tensor) -> Any:
    return sum(model(inputs) for model in models.values())


def train(run: Run, seed: int, until: int = 9, noise: bool = True) -> tuple[str, dict[str, float]]:
    """Trains to a step, from a checkpoint if there is one: a digest of all weights, and what is measured."""
    how = settings_of(seed)
    if not noise:
        how |= {"norm": False, "sometimes": False, "late": None, "break": False}  # otherwise in a leaf than in a batch
    torch.manual_seed(seed)
    names = ["one", "two"] if how["two"] else ["one"]
    models, optimizers = {}, {}
    nets = [Net(how["norm"], how["sometimes"], noise) for _ in names]
    for name, net in zip(names, nets, strict=True):
        if how["late"] == "channels last":
            for layer in (net.first, net.rare):  # weights in another layout
                layer.weight.data = layer.weight.data.t().contiguous().t()
        made = optimizer_of(net, how["optimizer"])
        models[name], optimizers[name] = run.setup(net, made, name=name, clip_norm=how["clip_norm"], ema=how["ema"])
        if how["late"] == "a hook":
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(clamp)
    run.restore()
    broken = run.progress.step > 2
    while run.progress.step < until:
        for inputs, labels in run.batches(
            data(100), how["batch_size"], accumulate=how["accumulate"], drop_last=how["drop_last"]
        ):
            if how["zero_grad"] == "before" and how["accumulate"] == 1:
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
            if how["late"] == "no loss" and not how["tokens"] and run.progress.step == 6 and float(inputs[0, 0]) > 0:
                for optimizer in optimizers.values():
                    run.step(optimizer)
                continue
            outputs = outputs_of(models, inputs)
            if how["tokens"]:  # labels of -1 count for nothing, so that leaves have different counts
                total = F.cross_entropy(outputs, labels, ignore_index=-1, reduction="sum")
                loss: Any = Mean(total, (labels >= 0).sum())
            else:
                loss = outputs.square().mean()
            run.backward(loss)
            if how["break"] and not broken and run.progress.step == 2:  # the batch comes again, whole
                broken = run.completes_batch
                if broken:
                    break
                continue
            if run.progress.step == 4 and how["late"] == "a second loss" and not how["tokens"]:
                run.backward(sum(model.first.weight.square().mean() for model in models.values()))
            if run.progress.step == 5 and how["late"] == "cleared" and how["accumulate"] == 1 and not how["two"]:
                optimizers["one"].zero_grad()  # of one leaf: then those of the other loss are all it has
                run.backward(outputs_of(models, inputs).abs().mean())
            clears = how["late"] == "the model cleared" and len(nets) == how["accumulate"] == 1
            if clears and run.progress.step == 7 and float(inputs[0, 0]) > 0:
                nets[0].zero_grad()
            run.log(loss=loss)
            stepped = [run.step(optimizer) for optimizer in optimizers.values()]
            if how["zero_grad"] == "after" and how["accumulate"] == 1:
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
            if stepped[0] and run.progress.step >= until:
                break
    run.checkpoint()
    measured = run.evaluate(lambda batch: {"power": models["one"](batch[0]).square().sum(1)}, data(37, 1), 16)
    digest = hashlib.sha256()
    for name in names:
        for key, value in run.modules[name].state_dict().items():
            digest.update(key.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16], measured


def refused(run: Run, what: str) -> None:
    plain = nn.Linear(12, 3)
    model, optimizer = run.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    if what == "own data":
        for _ in run.steps(1):
            run.backward(model(torch.ones(4, 12)).mean())
            run.step(optimizer)
    for inputs, _ in run.batches(data(64), 16):
        loss = model(inputs).square().mean()
        if what == "all_gather":
            loss = run.all_gather(model(inputs)).mean()
        run.backward(loss)
        if what == "no step":
            continue
        if what == "dropped" and run.progress.step == 2:
            optimizer.zero_grad()
            what = "all is well"
            continue
        if what == "clipped by hand":
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if run.step(optimizer) and what == "after a step":
            run.backward(model(inputs).mean())
