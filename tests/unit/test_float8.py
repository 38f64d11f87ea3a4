"""precision: fp8, imitated on the CPU: which layers are exchanged, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategy import float8

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.large(x) + self.small(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_LEAST_WEIGHTS", 64 * 64)


def test_large_layers_of_blocks_multiply_in_eight_bits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    model = Model(64)
    given = torch.randn(16, 64)
    before = model(given)
    parameters = dict(model.named_parameters())
    float8.use_float8(model, None, CPU)
    kinds = {name: type(each).__name__ for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    assert [name for name, kind in kinds.items() if kind == "Float8Linear"] == ["blocks.0.large", "blocks.1.large"]
    assert kinds["head"] == kinds["blocks.0.small"] == "Linear"
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[name] is parameters[name] for name in after)
    assert "2 of 4 linear layers" in caplog.text and "imitates" in caplog.text
    found = model(given)
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, before, rtol=0.1, atol=0.2)  # eight bits have three behind the point
    found.square().mean().backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in model.parameters())


def test_layers_that_are_small_or_of_odd_sizes_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(72)  # no multiple of 16
    float8.use_float8(model, None, CPU)
    assert not [each for each in model.modules() if type(each).__name__ == "Float8Linear"]
    assert "none of the 4 linear layers is large enough" in caplog.text and "bf16" in caplog.text


def test_a_model_without_blocks_has_all_of_its_large_layers_exchanged() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    float8.use_float8(model, None, CPU)
    assert [type(each).__name__ for each in model] == ["Float8Linear", "ReLU", "Linear"]


def test_a_layer_that_gets_no_rows_and_second_derivatives() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    float8.use_float8(model, None, CPU)
    assert model(torch.zeros(2, 0, 64)).shape == (2, 0, 64)  # an expert without tokens
    given = torch.randn(16, 64, requires_grad=True)
    with pytest.raises(ConfigError, match="fp8 has no second derivatives"):
        torch.autograd.grad(model(given).sum(), given, create_graph=True)


def test_gradients_agree_with_those_of_a_plain_layer_and_with_compiled_ones() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
    given = torch.randn(2, 16, 64, requires_grad=True)

    def gradients(forward: nn.Module) -> list[torch.Tensor]:
        return list(torch.autograd.grad(forward(given).square().mean(), [given, *model.parameters()]))

    wanted = gradients(model)
    float8.use_float8(model, None, CPU)
    found = gradients(model)
    compiled = gradients(torch.compile(model, backend="aot_eager"))
    for plain, short, same in zip(wanted, found, compiled, strict=True):
        assert 0 < (short - plain).norm() / plain.norm() < 0.15
        torch.testing.assert_close(same, short)


def test_rows_that_the_kernels_cannot_multiply_go_through_the_plain_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    given = torch.randn(5, 64)
    wanted = model(given)
    float8.use_float8(model, None, CPU)
    assert torch.equal(model(given), wanted)
    assert not torch.equal(model(given.repeat(16, 1))[:5], wanted)


def test_xla_is_refused() -> None:
    with pytest.raises(ConfigError, match="the runtime is xla: use bf16"):
        float8.use_float8(Model(64), None, torch.device("xla", 0))
