"""Loops with models that change while they are trained, and with unusual steps and saves."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from sharded_bodies import whole
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).double())


def weights(run: lockstep.Run) -> dict[str, list[float]]:
    return {
        f"{model}.{name}": whole(each)
        for model, module in run.modules.items()
        for name, each in module.named_parameters()
    }


class Scaled(nn.Module):
    """With scalars, one of which some examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x[:, :1] > 1
        found = self.scale * self.layer(x)
        return found + self.shift * shifted if shifted.any() else found  # type: ignore[no-any-return]


def teacher(run: lockstep.Run, until: int, plain: bool = False) -> dict[str, list[float]]:
    """A teacher that follows its student; a layer and an encoder that are trained from the second epoch on."""
    torch.manual_seed(0)
    student, encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(), Scaled().double().requires_grad_(False)
    student[0].requires_grad_(False)
    follower = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD([*student.parameters(), *encoder.parameters()], lr=0.1)
    encode = run.setup(encoder, name="encoder")
    model, optimizer = run.setup(student, optimizer, name="student", ema=0.9)
    target = run.setup(follower, name="teacher")
    run.restore()
    for epoch in run.epochs(2):
        later = [*itertools.islice(run.modules["student"].parameters(), 2), *run.modules["encoder"].parameters()]
        for each in later:
            each.requires_grad_(epoch > 0)
        for (batch,) in run.batches(DATA, 8):
            run.backward((model(encode(batch)) - target(batch) - 0.1).square().mean())
            run.step(optimizer)
            with torch.no_grad():
                pairs = zip(run.modules["teacher"].parameters(), run.modules["student"].parameters(), strict=True)
                for mine, other in pairs:
                    mine.data.lerp_(other.data, 0.1)
            if run.progress.step == until:
                run.checkpoint()
                break
        if run.progress.step == until:
            break
    with run.averaged_weights():
        averaged = weights(run)
    return weights(run) | {f"averaged {name}": each for name, each in averaged.items()}


def joint(run: lockstep.Run) -> dict[str, Any]:
    """One optimizer for two models, each with an average; one of them is trained later."""
    torch.manual_seed(0)
    encoder, head = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    parameters = [*encoder.parameters(), *head.parameters()]
    averages = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    encoder.requires_grad_(False)
    ema = {"decay": 0.9, "warmup": False}
    run.setup(encoder, name="encoder", ema=ema)
    run.setup(head, optimizer, name="head", ema=ema)
    names: list[str] = []
    for (batch,) in run.batches(DATA, 8):
        encoder.requires_grad_(run.progress.step > 1)
        run.backward((head(encoder(batch)) - 1).square().mean())
        names = sorted(run.gradients(optimizer))
        run.step(optimizer)
        for average, parameter in zip(averages, parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)
    with run.averaged_weights():
        differ = max(float((a - b).detach().abs().max()) for a, b in zip(averages, parameters, strict=True))
    return {"names": names, "differ": differ}


def wrong(run: lockstep.Run, what: str) -> None:
    net = nn.Linear(4, 1).double()
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), ema=0.9)
    for (batch,) in run.batches(DATA, 8, accumulate=2):
        loss = model(batch).square().mean()
        loss.backward() if what == "backward" else run.backward(loss)
        run.step(optimizer)
    with run.averaged_weights():
        run.checkpoint()


class Experts(nn.Module):
    """Each rank's part of a batch needs another expert."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if deep else nn.Linear(4, 4) for _ in range(2)]
        self.experts, self.last = nn.ModuleList(layers), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number, each in enumerate(self.experts):
            mine = (x[:, 0] < 0) == bool(number)
            if mine.any():
                found = found.index_add(0, mine.nonzero()[:, 0], each(x[mine]))
        return self.last(found)  # type: ignore[no-any-return]


def experts(run: lockstep.Run, deep: bool) -> None:
    torch.manual_seed(0)
    net = Experts(deep).double()
    x = DATA.tensors[0].clone()
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(32) % 8 < 4, 1.0, -1.0)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for (batch,) in run.batches(TensorDataset(x), 8, shuffle=False):
        run.backward(model(batch).square().mean())
        run.step(optimizer)
    run.checkpoint()


def second_pass(run: lockstep.Run) -> dict[str, list[float]]:
    """A second backward pass reaches the head alone."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 3), nn.Linear(3, 1)
    net = nn.Sequential(body, nn.Tanh(), head).double()
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for (batch,) in run.batches(DATA, 8):
        run.backward((model(batch) - 1).square().mean())
        run.backward((head(body(batch).detach() * 2) - batch[:, :1]).square().mean())
        run.step(optimizer)
    return weights(run)


def some_leaves(run: lockstep.Run, tokens: int) -> dict[str, list[float]]:
    """The last leaves of a batch have no tokens, and so no loss; somebody looks at gradients before there are any."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1).double()
    real = (torch.arange(32) % 16 < tokens).double().unsqueeze(1)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch, mask in run.batches(TensorDataset(DATA.tensors[0], real), 16, shuffle=False):
        run.gradients(optimizer)
        if mask.sum() > 0:
            run.backward(((model(batch) - 1).square() * mask).sum(), count=mask.sum())
        run.step(optimizer)
    return weights(run)


class Towers(nn.Module):
    """Towers that take turns, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.body, self.scale = nn.Linear(4, 8, bias=False), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.scale * self.towers[number](torch.tanh(self.body(x)))  # type: ignore[no-any-return]


class Whole(torch.optim.SGD):
    whole_matrices = True


def towers(run: lockstep.Run) -> dict[str, list[float]]:
    torch.manual_seed(0)
    net = Towers().double()
    model, optimizer = run.setup(net, Whole(net.parameters(), lr=0.1, momentum=0.9))
    for (batch,) in run.batches(DATA, 4):
        run.backward((model(batch, run.progress.step % 3) - 1).square().mean())
        run.step(optimizer)
    return weights(run)


def hook(run: lockstep.Run, late: bool) -> None:
    """A hook that clips: it sees the gradient of a part of the batch, or nothing."""
    net = nn.Linear(4, 1).double()
    if not late:
        net.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if late:
        model.get_parameter("weight").register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for (batch,) in run.batches(DATA, 8):
        run.backward(model(batch).square().mean())
        run.step(optimizer)


def unfrozen(run: lockstep.Run) -> None:
    net = nn.Linear(4, 1).double()
    net.weight.requires_grad_(False)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for (batch,) in run.batches(DATA, 8):
        run.backward(model(batch).square().mean())
        run.step(optimizer)
        net.weight.requires_grad_(True)


def tied(run: lockstep.Run) -> None:
    """Two models that share a weight."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    for each in (one, other):
        run.setup(each, torch.optim.SGD(each.parameters(), lr=0.1))
