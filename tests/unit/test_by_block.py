"""Graphs that are cut where blocks begin and end: what is compiled once, and what is not cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lockstep.strategy.compiled import by_block


class Block(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * torch.tanh(self.inner(x))


class Model(nn.Module):
    """Embeddings, blocks, a head that is tied to them, and the loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(16, 8), nn.ModuleList(blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x @ self.tokens.weight.T, targets)


class WithAutocast(Model):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens, targets)


class Swapped(nn.Module):
    """Returns more than one tensor, one of them a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(y), x.flatten(0, 0)


class Pairs(Model):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = y = self.tokens(tokens)
        for block in self.blocks:
            x, y = block(x, y * 1.5)
        return F.cross_entropy((x + y) @ self.tokens.weight.T, targets)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, forward: Callable[..., Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        tokens, targets = torch.randint(0, 16, (2, 24), generator=draw)
        loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pieces_of(make: Callable[[], Model]) -> int:
    """How many pieces are compiled of a model that trains as it does eagerly."""
    from torch._dynamo.backends.debugging import aot_eager

    compiled = []

    def counted(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    usual = make()
    torch.manual_seed(0)
    model = make()
    blocks = by_block(model.blocks, counted)
    assert trained(model, torch.compile(model, backend=blocks)) == pytest.approx(trained(usual, usual), rel=1e-5)
    for name, value in usual.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    return len(compiled)


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        pytest.param(lambda: Model(*(Block() for _ in range(5))), 3, id="before, a block, after"),
        pytest.param(lambda: Model(*(Block(1.0 + number % 2) for number in range(4))), 4, id="two kinds of block"),
        pytest.param(lambda: Model(*[Block()] * 3), 3, id="one block, called three times"),
        pytest.param(lambda: Pairs(*(Swapped() for _ in range(4))), 4, id="operations between blocks"),
        pytest.param(lambda: WithAutocast(*(Block() for _ in range(3))), 1, id="a state that holds across blocks"),
        pytest.param(lambda: Model(), 1, id="no blocks"),
    ],
)
def test_pieces_that_compute_the_same_are_compiled_once(make: Callable[[], Model], pieces: int) -> None:
    assert pieces_of(make) == pieces


def test_a_block_whose_weights_are_frozen_is_of_another_kind() -> None:
    def make() -> Model:
        model = Model(*(Block() for _ in range(3)))
        model.blocks[1].requires_grad_(False)
        return model

    assert pieces_of(make) == 4


def test_evaluating_and_training_share_a_model() -> None:
    model = Model(*(Block() for _ in range(3)))
    batch = torch.randint(0, 16, (2, 24))
    usual = model(*batch).item()
    compiled = torch.compile(model, backend=by_block(model.blocks, lambda graph, inputs: graph.forward))
    with torch.no_grad():
        assert compiled(*batch).item() == pytest.approx(usual)
    assert compiled(*batch).requires_grad
