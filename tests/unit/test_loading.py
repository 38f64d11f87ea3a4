"""What was saved into models and optimizers: names, shapes and what is no tensor, as torch itself takes them in.

How spread tensors are read is tested on real ranks (tests/ranks/test_sliced_checkpoints.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.strategy.slices import Stored, load_module, load_optimizer, read_like, slice_of


class InMemory(Stored):
    def __init__(self, tensor: Tensor) -> None:
        self.name, self.shape, self.dtype, self._tensor = "", tuple(tensor.shape), tensor.dtype, tensor
        self.reads = 0

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        self.reads += 1
        cut = tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))
        return self._tensor[cut].clone()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.layer.weight
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def stored(state: dict[str, Any]) -> dict[str, Any]:
    return {name: InMemory(each) if isinstance(each, Tensor) else each for name, each in state.items()}


def test_a_module_takes_in_all_that_it_saved() -> None:
    saved, model = Model(), Model()
    saved.extra = {"seen": 3}
    saved.norm.running_mean.fill_(2.0)
    load_module(model, stored(saved.state_dict()))
    assert model.extra == {"seen": 3}
    assert all(
        torch.equal(each, model.state_dict()[name]) for name, each in saved.state_dict().items() if name[0] != "_"
    )
    assert model.tied.weight is model.layer.weight


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "all"])
def test_what_does_not_fit_is_told_in_the_words_of_torch(change: str) -> None:
    state = dict(Model().state_dict())
    if change in ("missing", "all"):
        del state["layer.bias"], state["norm.running_var"]
    if change in ("unexpected", "all"):
        state["head.weight"] = torch.ones(10_000)
    if change in ("shape", "all"):
        state["norm.weight"] = torch.ones(3)
    with pytest.raises(RuntimeError) as expected:
        Model().load_state_dict(state)
    told = stored(state)
    with pytest.raises(RuntimeError) as found:
        load_module(Model(), told)
    assert str(found.value) == str(expected.value)
    assert "head.weight" not in told or told["head.weight"].reads == 0, "what nobody needs is not read"


def test_an_optimizer_takes_in_whole_tensors_and_numbers() -> None:
    def trained(learned: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(learned), amsgrad=True)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (_, saved), (_, optimizer) = trained(0.25), trained(0.5)
    state = saved.state_dict()
    told = {
        "state": {number: stored(entry) for number, entry in state["state"].items()},
        "param_groups": [stored(group) for group in state["param_groups"]],
    }
    load_optimizer(optimizer, told)
    assert optimizer.param_groups[0]["lr"].item() == 0.25
    for number, entry in optimizer.state_dict()["state"].items():
        assert {name: each.tolist() for name, each in entry.items()} == {
            name: each.tolist() for name, each in state["state"][number].items()
        }
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_optimizer(optimizer, {**told, "param_groups": told["param_groups"] * 2})


def test_what_is_read_keeps_its_form() -> None:
    value = {"a": [InMemory(torch.ones(2)), 1], "b": (None, "text"), "c": Counter("aab"), 3: {"x": torch.zeros(1)}}
    found = read_like(value, {"a": None})
    assert found["a"][0].tolist() == [1.0, 1.0] and found["b"] == (None, "text")
    assert type(found["c"]) is Counter and found[3]["x"].tolist() == [0.0]


def test_a_tensor_that_is_not_spread_is_whole() -> None:
    assert slice_of(torch.ones(3)) is None
