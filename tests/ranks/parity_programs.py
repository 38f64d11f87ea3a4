"""Parallel programs for the parity check, each with a fault that was once in somebody's code, and without it."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, VOCABULARY = 8, 11


class _Reduced(torch.autograd.Function):
    """Sums over a group, in the forward pass, in the backward pass, or in both."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.backward_too = group, backward
        value = value.clone()
        if forward:
            dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        if ctx.backward_too:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None, None


def reduced(value: Tensor, group: Any, forward: bool = False, backward: bool = False) -> Tensor:
    return value if group is None else _Reduced.apply(value, group, forward, backward)


class _Split(torch.autograd.Function):
    """Takes this rank's part of a sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.chunk(group.size(), 1)[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()].clone(), None


def gathered(value: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, 1)


def keep_part(module: nn.Module, name: str, dimension: int, group: Any) -> None:
    """Leaves a rank its part of a parameter, as a plain tensor."""
    whole = getattr(module, name)
    part = whole.detach().chunk(group.size(), dimension)[group.rank()].clone()
    setattr(module, name, nn.Parameter(part))


def average(model: nn.Module, group: Any, divide: bool = True) -> None:
    """Averages gradients over a group, as they come."""

    def reduce(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        if divide:
            parameter.grad /= group.size()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(reduce)


def multiply(parameter: nn.Parameter, by: float) -> None:
    assert parameter.grad is not None
    parameter.grad *= by


class Program:
    """A classifier; data parallel, unless a subclass says otherwise."""

    mesh: ClassVar[dict[str, int]] = {"data": 2}

    def __init__(self, faulty: bool = False) -> None:
        self.faulty = faulty

    def functions(self) -> dict[str, Any]:
        names = ("model", "batch", "loss", "parallelize", "optimizer", "after_backward", "shard_batch")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 4))

    def batch(self, step: int) -> Any:
        return torch.randn(8, WIDTH), torch.randint(4, (8,))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def parallelize(self, model: nn.Module, mesh: Any) -> Any:
        average(model, mesh.get_group("data"))


class MissingDivision(Program):
    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        average(model, mesh.get_group("data"), divide=not self.faulty)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.group: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.head.weight
        if self.group is not None:  # the gradient of the head is exchanged first, since it comes first
            weight = reduced(weight, self.group, backward=True) / self.group.size()
            weight = weight + (self.head.weight - weight).detach()
        return F.linear(torch.tanh(self.tokens(tokens)), weight)


class TiedOnce(Program):
    """The tied weight is exchanged with the head, before the gradient of the embedding is added."""

    def model(self) -> nn.Module:
        return LanguageModel()

    def batch(self, step: int) -> Any:
        tokens = torch.randint(VOCABULARY, (8, 5))
        return tokens[:, :-1], tokens[:, 1:].flatten()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), labels)

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        if self.faulty:
            model.group = mesh.get_group("data")
        else:
            average(model, mesh.get_group("data"))


class BrokenTie(TiedOnce):
    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        if self.faulty:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        average(model, mesh.get_group("data"))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * WIDTH))
        self.group: Any = None
        self.parts = 1

    def forward(self, value: Tensor) -> Tensor:
        squares = reduced(value.square().sum(-1, keepdim=True), self.group, forward=True, backward=True)
        return value * torch.rsqrt(squares / (value.shape[-1] * self.parts) + 1e-6) * self.weight


class Block(nn.Module):
    """A column-parallel layer, a norm over its features, and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), Norm()
        self.down = nn.Linear(2 * WIDTH, 4, bias=False)
        self.group: Any = None

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.norm(self.up(reduced(value, self.group, backward=True)))
        return reduced(self.down(hidden), self.group, forward=True)

    def split(self, group: Any, norm_over_all: bool = True) -> None:
        self.group = group
        for module, name, dimension in ((self.up, "weight", 0), (self.up, "bias", 0), (self.norm, "weight", 0),
                                        (self.down, "weight", 1)):  # fmt: skip
            keep_part(module, name, dimension, group)
        if norm_over_all:
            self.norm.group, self.norm.parts = group, group.size()


class LocalNorm(Program):
    mesh: ClassVar[dict[str, int]] = {"model": 2}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        model[1].split(mesh.get_group("model"), norm_over_all=not self.faulty)


class LocalClip(Program):
    """Gradients are clipped by the norm of a rank's shards."""

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        fully_shard(model, mesh=mesh)

    def after_backward(self, model: nn.Module, mesh: Any) -> None:
        own = [each.grad.to_local() if mesh else each.grad for each in model.parameters()]
        squares = sum(each.square().sum() for each in own)
        if mesh and not self.faulty:
            dist.all_reduce(squares)
        for each in own:
            each *= 0.1 / squares.sqrt()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 4) / 3)
        self.group: Any = None
        self.router_group: Any = None

    def forward(self, value: Tensor) -> Tensor:
        shares = reduced(self.router(value).softmax(-1), self.router_group, backward=True)
        if self.group is not None:
            shares = shares.chunk(self.group.size(), -1)[self.group.rank()]
        each = torch.einsum("bi,eio->beo", value, self.weight)
        return reduced((shares.unsqueeze(-1) * each).sum(1), self.group, forward=True)


class LocalRouter(Program):
    mesh: ClassVar[dict[str, int]] = {"model": 2}

    def model(self) -> nn.Module:
        return Experts()

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        model.group = mesh.get_group("model")
        model.router_group = None if self.faulty else model.group
        keep_part(model, "weight", 0, model.group)


class SequenceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.group: Any = None

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.first(value))
        if self.group is None:
            return self.last(self.norm(value))
        return self.last(_Gather.apply(self.norm(_Split.apply(value, self.group)), self.group))


class LocalSequenceNorm(Program):
    mesh: ClassVar[dict[str, int]] = {"model": 2}

    def model(self) -> nn.Module:
        return SequenceNorm()

    def batch(self, step: int) -> Any:
        return torch.randn(4, 6, WIDTH), torch.randint(4, (24,))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), labels)

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        model.group = mesh.get_group("model")
        if not self.faulty:
            average(model.norm, model.group, divide=False)


class WrongAxis(LocalNorm):
    mesh: ClassVar[dict[str, int]] = {"data": 2, "model": 2}

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        model[1].split(mesh.get_group("model"))
        average(model, mesh.get_group("model" if self.faulty else "data"))


class LocalTokens(TiedOnce):
    def batch(self, step: int) -> Any:
        tokens = torch.randint(VOCABULARY, (4, 6))
        labels = tokens[:, 1:].clone()
        labels[0, 1:] = -100  # the first row has one token that counts
        return tokens[:, :-1], labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        count, ranks = (labels != -100).sum(), 1
        if dist.is_initialized() and not self.faulty:
            dist.all_reduce(count)
            ranks = dist.get_world_size()
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum") / count * ranks

    def parallelize(self, model: nn.Module, mesh: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)


class Peaks(nn.Module):
    """Divides by a running mean, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.group: Any = None
        self.stale = False

    def forward(self, value: Tensor) -> Tensor:
        scaled = value / self.mean
        new = reduced(value.detach().abs().mean(0), self.group, forward=True)
        if not self.stale:
            self.mean.lerp_(new / (self.group.size() if self.group else 1), 0.5)
        return scaled


class StaleBuffer(Program):
    def model(self) -> nn.Module:
        return nn.Sequential(Peaks(), nn.Linear(WIDTH, 4))

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        model[0].group = mesh.get_group("data")
        model[0].stale = self.faulty and dist.get_rank() == 1
        average(model, mesh.get_group("data"))


class Unreached(Program):
    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        average(model, mesh.get_group("data"))
        if self.faulty:
            model[0].bias.register_post_accumulate_grad_hook(partial(multiply, by=0.0))


class OneRank(Program):
    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        average(model, mesh.get_group("data"))
        if self.faulty and dist.get_rank() == 1:
            model[2].bias.register_post_accumulate_grad_hook(partial(multiply, by=1.5))


class OwnRows(Program):
    """Every second row, which no module's output is compared with."""

    def shard_batch(self, batch: Any, mesh: Any) -> Any:
        return [each[mesh.get_local_rank("data") :: mesh["data"].size()] for each in batch]


class FullyShardedTensorParallel(Program):
    """As torchtitan does it: parallelize_module, activation checkpointing, fully_shard; and a `.float()`."""

    mesh: ClassVar[dict[str, int]] = {"data": 2, "model": 2}

    def model(self) -> nn.Module:
        wide = 2 * WIDTH
        layers = [nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(2)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs).float(), labels % 3)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def parallelize(self, model: nn.Module, mesh: Any) -> nn.Module:
        plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()}
        parallelize_module(model, mesh["model"], plan)
        for number in range(2):
            model[number] = checkpoint_wrapper(model[number])
            fully_shard(model[number], mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])
