"""What rules mean for the layers of a model on a mesh of processes: worked out from names and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lockstep.config.strategy import Strategy
from lockstep.errors import ConfigError
from lockstep.strategy import placing
from lockstep.strategy.mesh import by_rules, resolve_meshes
from lockstep.strategy.placing import has_no_memory, initialise
from lockstep.strategy.tensor_parallel import Layer, Plan, Split, plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight


def planned(rules: dict[str, Any], mesh: dict[str, int] | None = None, **more: Any) -> Plan:
    mesh = mesh or {"data": 2, "model": 2}
    settings = Strategy.model_validate({"type": "tensor", "mesh": mesh, "shard": rules, **more})
    meshes = resolve_meshes(settings, 4, "processes")
    model = Net()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    ruled = by_rules(shapes, meshes, settings, settings.shard)
    return plan(model, ruled, meshes["strategy.mesh"])


def test_columns_rows_and_the_biases_that_go_with_them() -> None:
    found = planned({"up.weight": ["model", None], "down.weight": {"spec": [None, "model"], "activations": "split"}})
    assert found.parameters == {
        "up.weight": Split("model", Shard(0)),
        "up.bias": Split("model", Shard(0)),
        "down.weight": Split("model", Shard(1)),
        "down.bias": Split("model", Replicate()),
    }
    assert found.layers == {
        "up": Layer("model", Replicate(), takes_split=False, leaves_split=False),
        "down": Layer("model", Shard(-1), takes_split=True, leaves_split=False),
    }


def test_a_tied_weight_is_split_once_and_by_both_of_its_layers() -> None:
    found = planned({"table.weight": ["model", None]})
    assert set(found.parameters) == {"table.weight"}
    assert set(found.layers) == {"table", "head"}


def test_an_axis_with_one_place_splits_nothing() -> None:
    assert planned({"up.weight": ["model", None]}, {"data": 4, "model": 1}) == Plan({}, {})


@pytest.mark.parametrize(
    ("rules", "more", "message"),
    [
        ({"norm.weight": ["model"]}, {}, r"strategy.shard.norm.weight: 'norm.weight' .* a LayerNorm .*nn.Linear"),
        ({"attention.in_proj_weight": ["model", None]}, {}, "it belongs to a MultiheadAttention"),
        ({"up.weight": [["data", "model"], None]}, {}, "split over data, which strategy: fsdp does"),
        ({"up.weight": ["data", None]}, {"type": "fsdp"}, "over data, which strategy: fsdp does by itself"),
        ({"up.weight": ["a", "b"]}, {"mesh": {"a": 2, "b": 2}}, "it is split over 2 axes"),
        ({"down.bias": ["model"]}, {}, "'down.bias' .* its layer is not split along its outputs"),
        ({"down.weight": [None, "model"], "down.bias": ["model"]}, {}, "'down.bias' .* not split along its outputs"),
        ({"up.weight": ["model", None]}, {"mesh": {"model": -1, "x": 4}, "type": "fsdp"}, "needs an axis 'data'"),
        ({"up.weight": ["model", None]}, {"mesh": {"data": 1, "model": 3}}, "mesh of 3 devices, but there are 4"),
        ({"table.weight": ["model", None]}, {"mesh": {"data": 1, "model": 4}}, "is 10, which model .4 devices. does"),
        ({}, {"mesh": {"replica": 2, "data": 2}}, "the axis 'replica' is for strategy: hsdp"),
        ({}, {"type": "hsdp"}, "strategy: hsdp needs an axis 'replica'"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_followed_is_refused_by_name(
    rules: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(rules, **more)


class Twins(nn.Module):
    """Two blocks of three share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
        self.layers[2][0].weight = self.layers[0][0].weight  # type: ignore[index, assignment]


def test_blocks_that_share_a_parameter_are_not_split_apart() -> None:
    model = Twins()
    blocks = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    assert list(placing.units(model, blocks)) == ["layers.1", ""]
    shared = next(each for each in placing.owned_by(model).values() if len(each.names) > 1)
    assert shared.names == ("layers.0.0.weight", "layers.2.0.weight")


def test_a_model_without_memory_gets_values_that_depend_on_nothing_but_seed_and_name() -> None:
    with torch.device("meta"):
        one, other = Net(), nn.ModuleDict({"up": nn.Linear(8, 32)})
    assert has_no_memory(one)
    before = torch.get_rng_state()
    initialise(one, seed=3)
    initialise(other, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "nobody else's random numbers are touched"
    assert torch.equal(one.up.weight, other["up"].weight)  # type: ignore[union-attr]
    assert one.head.weight is one.table.weight and not has_no_memory(one)
    with torch.device("meta"):
        again = Net()
    initialise(again, seed=4)
    assert not torch.equal(one.up.weight, again.up.weight)


def test_a_module_that_does_not_say_how_it_is_initialised_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(ConfigError, match=r"1\.gain: the model was made on the meta device, and Bare .*init_weights"):
        initialise(model, seed=0)
