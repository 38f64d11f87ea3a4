"""Meshes and sharding rules: what fits what, and what is said where something does not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config.strategy import Strategy
from lockstep.errors import ConfigError
from lockstep.strategy.mesh import MAIN, Sharding, batch_spec, fully_sharded, resolve_meshes, shard_rules, shardings

PARAMETERS = {"conv.weight": (32, 1, 3, 3), "fc1.weight": (128, 64), "fc1.bias": (128,), "fc2.weight": (10, 128)}


def strategy(**values: Any) -> Strategy:
    return Strategy.model_validate({"type": "spmd", **values})


def split(devices: int = 8, **values: Any) -> dict[str, Sharding]:
    settings = strategy(**values)
    return shardings(PARAMETERS, resolve_meshes(settings, devices), settings, settings.shard)


@pytest.mark.requirement("P03")
@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (None, 8, {"data": 8}),
        ({"data": 4, "model": 2}, 8, {"data": 4, "model": 2}),
        ({"data": -1, "model": 2}, 8, {"data": 4, "model": 2}),
        ({"data": 2, "model": -1}, 6, {"data": 2, "model": 3}),
        ({"data": -1, "model": 8}, 8, {"data": 1, "model": 8}),
        ({"x": 2, "y": 2, "z": 1, "w": 1}, 4, {"x": 2, "y": 2, "z": 1, "w": 1}),
    ],
)
def test_a_mesh_is_worked_out(mesh: Any, devices: int, expected: dict[str, int]) -> None:
    assert resolve_meshes(strategy(mesh=mesh), devices) == {MAIN: expected}


@pytest.mark.requirement("P03")
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 4, "model": 4}, r"strategy.mesh: \{data: 4, model: 4\} is a mesh of 16 devices, but there are 8"),
        ({"data": -1, "model": 3}, "the sizes that are given make 3, which does not divide the 8 devices"),
        ({"data": 1}, "is a mesh of 1 devices, but there are 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_meshes(strategy(mesh=mesh), 8)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"type": "spmd", "mesh": {}}, "a mesh needs at least one axis"),
        ({"type": "spmd", "mesh": {"data": 0}}, "the size of an axis is 1 or more, or -1"),
        ({"type": "spmd", "mesh": {"data": -1, "model": -1}}, "only one axis can be -1"),
        ({"type": "ddp", "mesh": {"data": 2}}, "mesh is for strategy: fsdp, hsdp or tensor, but the strategy is ddp"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_by_the_config(strategy: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Strategy.model_validate(strategy)


@pytest.mark.requirement("P04")
def test_rules_go_by_patterns_and_the_first_that_matches_counts() -> None:
    rules = {"fc1.weight": ["data", "model"], "*.weight": {"spec": ["model", None, None, None], "mesh": "wide"}}
    meshes = {"wide": {"data": 4, "model": 2}}
    only_conv = {"conv.weight": PARAMETERS["conv.weight"], "fc1.weight": PARAMETERS["fc1.weight"]}
    settings = strategy(mesh={"data": 4, "model": 2}, meshes=meshes, shard=rules)
    assert shardings(only_conv, resolve_meshes(settings, 8), settings, settings.shard) == {
        "fc1.weight": Sharding(MAIN, ("data", "model")),
        "conv.weight": Sharding("strategy.meshes.wide", ("model", None, None, None)),
    }


@pytest.mark.requirement("P04")
def test_several_axes_can_split_one_dimension() -> None:
    found = split(mesh={"data": 4, "model": 2}, shard={"fc1.weight": [["data", "model"], None]})
    assert found == {"fc1.weight": Sharding(MAIN, (("data", "model"), None))}


@pytest.mark.requirement("P04")
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"fc3.weight": ["data", None]}, r"strategy.shard.fc3.weight: no parameter .* the nearest are fc[12].weight"),
        ({"fc1.bias": ["data", None]}, r"\[data, null\] has 2 entries, but 'fc1.bias' has 1 dimensions \[128\]"),
        ({"fc2.weight": ["data", None]}, r"dimension 0 of 'fc2.weight' \[10, 128\] is 10, which data \(4 devices\)"),
        ({"fc1.weight": ["modle", None]}, "the mesh has no axis 'modle', did you mean model?"),
        ({"fc1.weight": ["data", "data"]}, "uses the axis 'data' twice"),
        ({"fc1.weight": {"spec": ["data", None], "mesh": "wide"}}, "mesh 'wide' is not declared; .* has none"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_by_name(rules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(mesh={"data": 4, "model": 2}, shard=rules)


def test_fsdp_splits_large_parameters_along_their_longest_dimension_that_divides() -> None:
    found = split(type="fsdp")
    assert found == {
        "fc1.weight": Sharding(MAIN, ("data", None)),
        "fc2.weight": Sharding(MAIN, (None, "data")),
    }
    assert fully_sharded((33, 65), {"data": 8}) is None  # nothing divides
    assert fully_sharded((8, 8), {"data": 8}) is None  # too small to be worth it
    assert fully_sharded((64, 64), {"model": 8}) is None  # no data axis


def test_a_rule_comes_before_fsdp() -> None:
    found = split(type="fsdp", mesh={"data": 4, "model": 2}, shard={"fc1.weight": [None, "model"]})
    assert found["fc1.weight"].spec == ("data", "model"), "fsdp takes a dimension that the rule leaves whole"
    assert found["fc2.weight"].spec == (None, "data")


def test_tensor_needs_rules() -> None:
    with pytest.raises(ConfigError, match=r"strategy: tensor splits by rules, and there are none"):
        split(type="tensor")


def test_batches_are_spread_over_data_alone() -> None:
    assert batch_spec(3, {"data": 4, "model": 2}) == ("data", None, None)
    assert batch_spec(2, {"model": 8}) == (None, None)


def test_rules_from_code_are_held_to_the_same() -> None:
    assert shard_rules({"a": ("data", None)})["a"].spec == ("data", None)
    with pytest.raises(ConfigError, match=r"shard_rules: 'a': .* got 7"):
        shard_rules({"a": 7})
    with pytest.raises(ConfigError, match="shard_rules: 'a'"):
        shard_rules({"a": [7]})
