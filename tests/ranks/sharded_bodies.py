"""What ranks do in tests of models that are split over a mesh of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.strategy.slices import slice_of

WIDTH, WORDS = 12, 10


def sentences(count: int = 50) -> TensorDataset:
    """Of 7 tokens each, of which between 2 and 7 are real."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (count, 7), generator=generator)
    lengths = torch.randint(2, 8, (count, 1), generator=generator)
    return TensorDataset(tokens, (torch.arange(7) < lengths).float())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Tied weights, a frozen parameter, one that ranks do not divide, a buffer that is not saved and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.odd = nn.Parameter(torch.randn(7, 5))
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.rand(3) + 0.5, persistent=False)
        self.shift = torch.randn(2)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) * self.scale[0] + self.shift[0] + self.fixed + self.odd.mean()  # type: ignore[index]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def token_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens, mask = batch
    each = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (each * mask[:, 1:].flatten()).sum(), mask[:, 1:].sum()


def whole(tensor: Tensor) -> list[float]:
    return [float(each) for each in put_together(tensor).flatten()]


def put_together(tensor: Tensor) -> Tensor:
    """What a DTensor is a part of; its own full_tensor() is wrong up to torch 2.9 where a part of a part is short."""
    part = slice_of(tensor.detach())
    if part is None:
        return tensor.detach()
    found = torch.zeros(part.shape, dtype=torch.float64)  # gloo does not know every type
    if dist.get_rank() == part.holders[0]:
        found[tuple(slice(at, at + n) for at, n in zip(part.offset, part.tensor.shape, strict=True))] = part.tensor
    dist.all_reduce(found)
    return found


def trained(run: lockstep.Run, precision: str = "float32", parallelize: Any = None) -> dict[str, Any]:
    """Two epochs with short batches, in parts, by tokens, clipped, in two groups of parameters; then measured."""
    model = run._engine.strategy.build(Language)
    names = dict(model.named_parameters())
    decayed = [each for each in names.values() if each.dim() > 1 and each.requires_grad]
    rest = [each for each in names.values() if each.dim() < 2 and each.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
    model, optimizer = run.setup(model, optimizer, clip_norm=0.5, precision=precision, parallelize=parallelize)
    first = {name: whole(each) for name, each in run.module.named_parameters()}
    data, losses = sentences(), []
    for _ in range(2):
        for batch in run.batches(data, 9, accumulate=2):
            with run.autocast():
                total, count = token_loss(model, batch)
            run.backward(total, count=count)
            if run.step():
                losses.append(float(total.detach()))

    def measure(batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": lockstep.Mean(*token_loss(run.module, batch))}

    measured = run.evaluate(measure, data, 11)
    run._engine.checkpointer.compared({}, "whether replicas are alike", run.progress.step)
    parts = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in run.module.parameters())
    return {
        "first": first,
        "weights": {name: whole(each) for name, each in run.module.named_parameters()},
        "step": run.progress.step,
        "tied": run.module.head.weight is run.module.table.weight,
        "parts": parts,
        **measured,
    }


def in_unusual_ways(run: lockstep.Run) -> dict[str, Any]:
    """Methods beside forward, models that are frozen for a while, gradients that are not finite on one rank."""
    model = run._engine.strategy.build(Language)
    without_memory = all(each.is_meta for each in model.parameters())
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
    model, optimizer = run.setup(model, optimizer, on_nan="skip")
    second = run._engine.strategy.build(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    adagrad = torch.optim.Adagrad(second.parameters(), lr=0.1, initial_accumulator_value=0.5)
    second, adagrad = run.setup(second, adagrad, name="second")
    found: dict[str, Any] = {"without_memory": without_memory}
    data = sentences(16)
    for number, (tokens, _) in enumerate(run.batches(data, 8, shuffle=False)):
        loss = model.embedded(tokens).square().mean() + model(tokens).square().mean()
        if number == 1 and run.rank == 0:
            loss = loss * float("nan")
        run.backward(loss)
        run.step(optimizer)
    found["after_nan"] = {name: whole(each) for name, each in run.modules["model"].named_parameters()}
    inputs = torch.linspace(-1, 1, 24).view(8, 3)
    for (batch,) in run.batches(TensorDataset(inputs), 4, shuffle=False):
        with run.frozen(second):
            second(batch.requires_grad_()).sum().backward()
            assert all(each.grad is None for each in second.parameters())
        run.backward(second(batch).square().mean())
        run.step(adagrad)
    found["second"] = {name: whole(each) for name, each in run.modules["second"].named_parameters()}
    return found


OPTIMIZERS = ("AdamW", "Adam", "SGD", "RMSprop", "Rprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")


class OwnAdamW(torch.optim.AdamW):
    """One's own: nobody knows what it does, so that it is given DTensors."""


class OwnRprop(torch.optim.Rprop):
    """Does what torch cannot do on DTensors."""


OWN = {"OwnAdamW": OwnAdamW, "OwnRprop": OwnRprop}


def optimizers(run: lockstep.Run) -> dict[str, Any]:
    """Two steps by each optimizer that works on every number by itself."""
    found = {}
    data = sentences(8)
    for name in (*OPTIMIZERS, "OwnAdamW"):
        torch.manual_seed(0)
        model = run._engine.strategy.build(Block)
        optimizer = (OWN.get(name) or getattr(torch.optim, name))(model.parameters(), lr=0.01)
        model, optimizer = run.setup(model, optimizer, name=name)
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(WORDS, WIDTH, generator=generator)
        for tokens, _ in run.batches(data, 4, shuffle=False, name=name):
            run.backward(model(table[tokens]).square().mean())
            run.step(optimizer)
        found[name] = {key: whole(each) for key, each in run.modules[name].named_parameters()}
    return found


def made_without_memory(run: lockstep.Run) -> dict[str, Any]:
    """A model that is never whole: made on the meta device by all ranks, and initialised module by module."""

    def init_weights(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.normal_(std=0.1)
        if isinstance(module, Language):
            module.scale.fill_(0.75)  # type: ignore[operator, union-attr]
            module.shift = torch.tensor([0.25, 0.5])

    with torch.device("meta"):
        model = Language()
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
    model, optimizer = run.setup(model, optimizer, init_weights=init_weights)
    first = {name: whole(each) for name, each in run.module.named_parameters()}
    for batch in run.batches(sentences(16), 8, shuffle=False):
        total, count = token_loss(model, batch)
        run.backward(total, count=count)
        run.step()
    return {"first": first, "weights": {name: whole(each) for name, each in run.module.named_parameters()}}


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def between(run: lockstep.Run) -> None:
    """A scalar, of which each rank gets the gradient of its features."""
    model = run._engine.strategy.build(lambda: nn.Sequential(nn.Linear(4, 8), Swish(), nn.Linear(8, 2)))
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.batches(torch.utils.data.TensorDataset(torch.randn(8, 4)), 8):
        run.backward(model(x).square().mean())
        run.step(optimizer)


def refused(run: lockstep.Run, what: str) -> None:
    """Something that cannot be split over a mesh."""
    model: nn.Module = Language()
    trained = [each for each in model.parameters() if each.requires_grad]
    if what == "sparse":
        model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
        trained = list(model.parameters())
    kind = OWN.get(what) or getattr(torch.optim, what, torch.optim.SGD)
    model, optimizer = run.setup(model, kind(trained, lr=0.1))
    for tokens, _ in run.batches(sentences(4), 4):
        run.backward(model(tokens).square().mean())
        run.step(optimizer)
