"""Optimizers that have a fused step use it where the runtime gains by it, and clip gradients within it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lockstep.strategy.optimizer_step import divides_gradients, dividing, use_fused_step, with_own_kernels
from lockstep.strategy.parameters import multiply_gradients

CPU = torch.device("cpu")  # which has fused kernels as well


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_used_where_nobody_said_otherwise(kind: type[Optimizer], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = linear()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    assert not divides_gradients(optimizer)
    assert use_fused_step(optimizer, model, CPU)
    assert divides_gradients(optimizer)
    assert "fused: false" in caplog.text
    assert not use_fused_step(optimizer, model, CPU)  # it is decided


class Own(AdamW):
    """May do anything."""


def sparse() -> tuple[nn.Module, Optimizer]:
    model = nn.Embedding(4, 2, sparse=True)
    return model, SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: AdamW(model.parameters(), fused=False),
        lambda model: AdamW(model.parameters(), foreach=True),
        lambda model: Own(model.parameters()),
        lambda model: Adagrad(model.parameters()),
        lambda model: AdamW([{"params": [model.weight], "fused": False}, {"params": [model.bias]}]),
    ],
)
def test_left_as_it_is(make: Any) -> None:
    model = linear()
    optimizer = make(model)
    before = [dict(group, params=None) for group in optimizer.param_groups]
    assert not use_fused_step(optimizer, model, CPU)
    assert [dict(group, params=None) for group in optimizer.param_groups] == before


def test_not_for_sparse_gradients_nor_for_what_is_elsewhere() -> None:
    model, optimizer = sparse()
    assert not use_fused_step(optimizer, model, CPU)
    model = linear()
    assert not use_fused_step(AdamW(model.parameters()), model, torch.device("cuda"))  # offloaded to the host


@pytest.mark.parametrize("make", [
    lambda p: Adam(p, lr=0.1), lambda p: AdamW(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9),
])  # fmt: skip
def test_divided_within_the_step_as_if_before(make: Any) -> None:
    one, other = linear(), linear()
    apart, fused = make(one.parameters()), make(other.parameters())
    use_fused_step(fused, other, CPU)
    for step in range(4):
        for model in (one, other):
            model(torch.arange(3.0) + step).square().sum().backward()
        for parameter in one.parameters():
            parameter.grad /= 7.0
        apart.step()
        with dividing(fused, torch.tensor(7.0)):
            fused.step()
        for optimizer in (apart, fused):
            optimizer.zero_grad()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not hasattr(fused, "grad_scale")


@pytest.mark.parametrize("saved_fused", [True, False])
def test_a_checkpoint_does_not_say_how_a_step_is_computed(saved_fused: bool) -> None:
    """One of a GPU goes on without fused kernels on a CPU, and the other way round."""
    before, after = linear(), linear()
    saving, loading = AdamW(before.parameters(), lr=0.5), AdamW(after.parameters(), lr=0.1)
    use_fused_step(saving if saved_fused else loading, before, CPU)
    before(torch.ones(3)).sum().backward()
    saving.step()
    state = with_own_kernels(loading, saving.state_dict())
    assert state["param_groups"][0]["params"] == [0, 1]
    loading.load_state_dict(state)
    assert bool(loading.param_groups[0]["fused"]) is not saved_fused
    assert loading.param_groups[0]["lr"] == 0.5
    after(torch.ones(3)).sum().backward()
    loading.step()
    assert all(float(each["step"]) == 2 for each in loading.state.values())


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_gradients_in_bfloat16_are_multiplied_by_a_factor_that_is_not_rounded_to_it(device: str) -> None:
    parameter, tokens = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device)), 769
    parameter.grad = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    expected = parameter.grad.double() / tokens
    multiply_gradients([parameter], torch.tensor(1 / tokens, dtype=torch.float64))
    assert float(parameter.grad.double().norm() / expected.norm()) == pytest.approx(1, abs=1e-3)
