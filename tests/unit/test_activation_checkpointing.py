"""Blocks that are computed again in the backward pass: the same numbers, and less that is kept."""

from __future__ import annotations

import copy
import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
import torch.nn.functional as F
from stacks import DATA, Runs, Stack, fresh, train
from torch import Tensor, nn

from lockstep.errors import ConfigError
from tasks import Block


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("which", ["blocks", "blocks.*.inner", "*"])
def test_losses_weights_and_buffers_are_those_of_a_run_without_it(
    new_run: Runs, precision: str, accumulate: int, which: str
) -> None:
    settings = {"precision": precision, "accumulate": accumulate}
    usual, recomputed = fresh(), fresh()
    losses = train(new_run(), usual, **settings)
    assert train(new_run(), recomputed, activation_checkpointing=which, **settings) == losses
    before, after = usual.state_dict(), recomputed.state_dict()
    assert list(before) == list(after)
    assert any("running_mean" in name for name in before) and any("_u" in name for name in before)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


class Counting(Block):
    """Notes every forward pass, and whether what it computed inside is still there."""

    def __init__(self) -> None:
        super().__init__(8, 0.0, False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        inside = self.inner(x)
        self.kept = weakref.ref(inside)
        return x + self.out(inside * inside)


class CountingStack(Stack):
    def __init__(self) -> None:
        super().__init__(spectral=False)
        self.blocks = nn.ModuleList(Counting() for _ in range(3))


@pytest.mark.parametrize("activation_checkpointing", [None, "blocks"])
def test_activations_are_dropped_and_computed_again(new_run: Runs, activation_checkpointing: str | None) -> None:
    run, model = new_run(), fresh(CountingStack)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), activation_checkpointing=activation_checkpointing)
    for _ in run.steps(1):
        loss = run.model(DATA.tensors[0]).sum()
        assert [block.kept() is None for block in model.blocks] == [activation_checkpointing is not None] * 3
        run.backward(loss)
        run.step()
    assert [block.passes for block in model.blocks] == [2 if activation_checkpointing else 1] * 3


def test_without_gradients_nothing_is_done_twice(new_run: Runs) -> None:
    run, model = new_run(), fresh(CountingStack)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), activation_checkpointing="blocks")
    with torch.no_grad():
        run.module(DATA.tensors[0])
    assert [block.passes for block in model.blocks] == [1] * 3


def test_a_deep_copy_computes_with_its_own_weights(new_run: Runs) -> None:
    """As one makes it for averaged weights; with what is done around a block's forward pass in place."""
    run, model = new_run(), fresh(dropout=0.0)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), activation_checkpointing="blocks")
    inputs = DATA.tensors[0]
    before = run.module(inputs)
    twin = copy.deepcopy(run.module)
    with torch.no_grad():
        for parameter in twin.blocks.parameters():
            parameter.zero_()
    assert torch.equal(run.module.eval()(inputs), run.module.eval()(inputs))
    run.module.train()
    assert not torch.equal(twin(inputs), before)
    twin(inputs).sum().backward()
    assert all(each.grad is None for each in run.module.parameters())
    assert all(each.grad is not None for each in twin.blocks.parameters())


def test_a_layer_that_is_used_again_and_again(new_run: Runs) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(8, 0.2, True)] * 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    usual, recomputed = fresh(Shared), fresh(Shared)
    assert train(new_run(), recomputed, activation_checkpointing="blocks") == train(new_run(), usual)
    assert all(torch.equal(value, recomputed.state_dict()[name]) for name, value in usual.state_dict().items())


def test_what_python_and_numpy_draw_in_a_block_is_drawn_once(new_run: Runs) -> None:
    class Jumpy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (random.random() + np.random.rand()))  # as stochastic depth has it

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Jumpy(8, 0.2, buffers) for buffers in (True, False, False))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    usual, recomputed = fresh(Net), fresh(Net)
    assert train(new_run(), recomputed, activation_checkpointing="blocks") == train(new_run(), usual)
    assert all(torch.equal(value, recomputed.state_dict()[name]) for name, value in usual.state_dict().items())


def test_a_model_without_blocks_is_told_of(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with caplog.at_level(logging.WARNING):
        train(new_run(), model, activation_checkpointing="blocks")
    assert "Sequential has no stack of blocks that are alike, so that nothing is recomputed" in caplog.text


def test_the_blocks_of_the_config_count(new_run: Runs) -> None:
    run, model = new_run(strategy={"blocks": "blocks.1"}), fresh(CountingStack)
    train(run, model, steps=1, activation_checkpointing="blocks")
    assert [block.passes for block in model.blocks] == [1, 2, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"activation_checkpointing": "layers.*"},
            r"train\.activation_checkpointing: layers\.\*: no module .* nearest are blocks\.",
        ),
        ({"compile": "bloks"}, "compile must be True, False, 'blocks', or a mapping"),
    ],
)
def test_what_names_nothing_is_refused(new_run: Runs, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(new_run(), fresh(), **settings)


class Caching(Block):
    """Adds to a cache in every call, as a transformer does that generates."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*getattr(self, "seen", []), x.detach()]
        return F.gelu(self.inner(torch.cat(self.seen))).sum() + x


def test_a_block_that_keeps_something_is_told_what_to_do(new_run: Runs) -> None:
    model = nn.Sequential(*(Caching(8, 0.0, False) for _ in range(2)))
    with pytest.raises(ConfigError, match=r"recomputed must not keep anything .*use_cache=False"):
        train(new_run(), model, activation_checkpointing="blocks")
