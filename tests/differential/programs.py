"""Small training loops as data: several models, optimizers, losses and sources, in every order that people write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

FEATURES = 3


@dataclass(frozen=True)
class Source:
    kind: str  # tensors, list, subset or stream
    length: int
    batch_size: int
    shuffle: bool
    named: bool
    loader: bool = False  # whether the loop has a DataLoader of torch

    @property
    def batches(self) -> int:
        return -(-self.length // self.batch_size)


@dataclass(frozen=True)
class Loss:
    models: tuple[int, ...]  # the batch goes through one after the other; maybe through one twice
    detach: bool  # before the last of them
    mean: bool  # else a sum and a count, over unequal examples
    steps: tuple[int, ...]  # the optimizers that step with it
    every: int  # so many batches
    first: str = "trained"  # else the first of them is frozen, or computed without gradients


@dataclass(frozen=True)
class Walk:
    """One inner loop of every epoch, or of some."""

    sources: tuple[int, ...]  # two are walked together
    epochs: str  # all, first or later
    leave: int  # 0, or: break after a step whose number this divides
    accumulate: int
    losses: tuple[Loss, ...]
    steps_last: bool = False  # whether optimizers step after all losses, or each after its own
    form: str = "zip"  # of two sources; or the second begins again, or is walked for each batch of the first: nested


@dataclass(frozen=True)
class Program:
    optimizers: tuple[str, ...]  # one for each model
    clip: float | None
    ema: bool
    sources: tuple[Source, ...]
    walks: tuple[Walk, ...]
    epochs: int
    quit_at: int  # before the step that would follow this one, a loop is left once
    zero_grad: bool  # whether the loop keeps the zero_grad() of the plain one
    joint: bool = False  # whether the first optimizer steps the first two models
    looks: bool = False  # at gradients before each step, and at metrics after each walk: that changes nothing
    frozen: str = "never"  # the epochs in which the weight of the first model is not trained: first or later

    def owners(self, models: Iterable[int]) -> list[int]:
        """The optimizers that step these models."""
        return list(dict.fromkeys(0 if self.joint and each == 1 else each for each in models))

    def owned(self, optimizer: int) -> list[int]:
        """The models that an optimizer steps."""
        return [each for each in range(len(self.optimizers)) if self.owners([each]) == [optimizer]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Program:
        walks = tuple(
            Walk(tuple(each["sources"]), each["epochs"], each["leave"], each["accumulate"],
                 tuple(Loss(**{**loss, "models": tuple(loss["models"]), "steps": tuple(loss["steps"])})
                       for loss in each["losses"]), each["steps_last"], each["form"])
            for each in data["walks"]
        )  # fmt: skip
        sources = tuple(Source(**each) for each in data["sources"])
        return cls(**{**data, "optimizers": tuple(data["optimizers"]), "sources": sources, "walks": walks})


@dataclass(frozen=True)
class Way:
    """How Lockstep trains a program: on so many ranks, up to a step, then resumed on others."""

    ranks: int
    strategy: str
    until: int | None = None
    signal: bool = False  # whether it is asked to leave at that step, or saves there by itself


# What both sides build


def build_models(program: Program) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).double() for _ in program.optimizers]
    made: list[torch.optim.Optimizer] = []
    for number, kind in enumerate(program.optimizers):
        parameters = [each for model in program.owned(number) or [number] for each in models[model].parameters()]
        if kind == "adamw":
            made.append(torch.optim.AdamW(parameters, lr=0.01, eps=1e-2))
        else:
            made.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0))
    return list(models), made


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([[row] for row in self._rows])


def build_source(number: int, source: Source) -> Dataset[Any]:
    """Every example holds its source and its index, then its features."""
    features = torch.randn(source.length, FEATURES, generator=torch.Generator().manual_seed(number)).double()
    indices = torch.arange(source.length).double().reshape(-1, 1)
    rows = torch.cat([torch.full_like(indices, number), indices, features], 1)
    if source.kind == "list":
        return [[row] for row in rows]  # type: ignore[return-value]
    if source.kind == "stream":
        return Stream(list(rows))
    if source.kind == "subset":
        spare = torch.zeros(1, rows.shape[1]).double()
        return Subset(TensorDataset(torch.cat([spare, rows])), range(1, source.length + 1))
    return TensorDataset(rows)


def computed(
    loss: Loss,
    models: Sequence[nn.Module],
    batches: Sequence[Tensor],
    frozen: Callable[[nn.Module], AbstractContextManager[None]],
) -> tuple[Tensor, Tensor | None]:
    """A loss over the examples at hand: a mean, or a sum and a count. `frozen` gives a model no gradients."""
    losses, counts = [], []
    for batch in batches:
        value = batch[:, 2:]
        for place, number in enumerate(loss.models):
            if loss.detach and place == len(loss.models) - 1:
                value = value.detach()
            model = models[number]
            aside = (
                nullcontext()
                if place or loss.first == "trained"
                else (torch.no_grad() if loss.first == "no gradients" else frozen(model))
            )
            with aside:
                value = model(value)
        each = (value - 0.3).square().mean(1)
        weights = torch.ones_like(each) if loss.mean else 1 + batch[:, 1] % 3
        losses.append((each * weights).sum() if not loss.mean else each.mean())
        counts.append(weights.sum())
    return torch.stack(losses).sum(), None if loss.mean else torch.stack(counts).sum()


def is_walked(walk: Walk, epoch: int) -> bool:
    return is_among(walk.epochs, epoch)


def is_among(epochs: str, epoch: int) -> bool:
    return {"all": True, "first": epoch == 0, "later": epoch > 0, "never": False}[epochs]


def freeze(program: Program, models: Sequence[nn.Module], epoch: int) -> None:
    if program.frozen != "never":
        models[0].get_parameter("0.weight").requires_grad_(not is_among(program.frozen, epoch))


# How they are drawn


@st.composite
def programs(draw: st.DrawFn) -> Program:
    models = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=2))
    sources = tuple(
        Source(
            kind=draw(st.sampled_from(["tensors", "tensors", "list", "subset", "stream"])),
            length=draw(st.sampled_from(lengths)), batch_size=draw(st.integers(1, 4)), shuffle=draw(st.booleans()),
            named=draw(st.booleans()),
            loader=draw(st.integers(0, 3)) == 0,
        )
        for _ in range(draw(st.integers(1, 3)))
    )  # fmt: skip
    joint = models > 1 and draw(st.integers(0, 2)) == 0
    zero_grad = joint or draw(st.booleans())
    walks = tuple(_walk(draw, models, len(sources), zero_grad, joint) for _ in range(draw(st.integers(1, 3))))
    return Program(
        optimizers=tuple(draw(st.sampled_from(["sgd", "momentum", "adamw"])) for _ in range(models)),
        clip=draw(st.sampled_from([None, None, 0.05])), ema=draw(st.booleans()), sources=sources, walks=walks,
        epochs=draw(st.integers(1, 3)), quit_at=draw(st.sampled_from([-1, -1, 0, 1, 3])),
        zero_grad=zero_grad, joint=joint, looks=draw(st.integers(0, 2)) == 0,
        frozen=draw(st.sampled_from(["never", "never", "first", "later"])),
    )  # fmt: skip


def _walk(draw: st.DrawFn, models: int, sources: int, zero_grad: bool, joint: bool) -> Walk:
    chosen = tuple(draw(st.lists(st.integers(0, sources - 1), min_size=1, max_size=2, unique=True)))
    losses = [_loss(draw, models) for _ in range(draw(st.sampled_from([1, 1, 2, 3])))]
    if not zero_grad:
        # Then nothing but zero_grad() would say which losses of an optimizer are added up, and which are not.
        once: set[int] = set()
        kept = []
        for loss in losses:
            if not once.intersection(loss.steps):
                kept.append(replace(loss, every=1))
                once.update(loss.steps)
        losses = kept
    # With steps between its losses, a batch that is taken in parts has models of two ages, in plain PyTorch as well.
    stepped = {each for loss in losses for each in loss.steps}
    apart = len(losses) == 1 or not any(stepped.intersection(loss.models) - {*loss.steps} for loss in losses)
    apart = apart and sum(len(loss.steps) for loss in losses) == len(stepped) and not (joint and len(losses) > 1)
    form = draw(st.sampled_from(["zip", "begins again", "nested"])) if len(chosen) > 1 else "zip"
    if form == "nested":
        losses = [replace(loss, every=1) for loss in losses]
    return Walk(
        chosen,
        epochs=draw(st.sampled_from(["all", "all", "all", "first", "later"])),
        leave=draw(st.sampled_from([0, 0, 0, 2, 3])),
        accumulate=draw(st.sampled_from([1, 1, 1, 2, 3])) if len(chosen) == 1 and apart else 1,
        losses=tuple(losses),
        steps_last=draw(st.booleans()),
        form=form,
    )


def _loss(draw: st.DrawFn, models: int) -> Loss:
    chosen = tuple(draw(st.lists(st.integers(0, models - 1), min_size=1, max_size=models + 1)))
    detach = len(chosen) > 1 and draw(st.booleans())
    first = draw(st.sampled_from(["trained", "trained", "frozen", "no gradients"])) if len(chosen) > 1 else "trained"
    reached = chosen[-1:] if detach else chosen if first == "trained" else chosen[1:]
    steps = tuple(draw(st.lists(st.sampled_from(reached), min_size=1, max_size=len(set(reached)), unique=True)))
    return Loss(chosen, detach, draw(st.booleans()), steps, draw(st.sampled_from([1, 1, 1, 2, 3])), first)


@st.composite
def ways(draw: st.DrawFn) -> tuple[Way, ...]:
    found, exact = [], draw(st.integers(0, 3)) == 0
    for stops in [True] * draw(st.integers(0, 2)) + [False]:
        ranks = draw(st.integers(1, 2 if exact else 3))
        strategy = "exact" if exact else draw(st.sampled_from(["auto", "fsdp"]))
        found.append(Way(ranks, strategy, draw(st.integers(1, 8)) if stops else None, draw(st.booleans())))
    return tuple(found)
