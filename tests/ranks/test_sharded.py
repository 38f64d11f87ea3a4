"""A mesh of processes gives the same answer as one process, whatever is split over it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded_bodies
import through_host_bodies

import lockstep

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": "60 s"})

COLUMNS_AND_ROWS = {
    "layers.*.up.weight": ["model", None],
    "layers.*.down.weight": [None, "model"],
    "table.weight": ["model", None],  # which is the head's as well
}
STAYING_SPLIT = {
    "layers.*.up.weight": {"spec": ["model", None], "activations": "split"},
    "layers.*.up.bias": ["model"],
    "layers.*.down.weight": {"spec": [None, "model"], "activations": "split"},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-1": (1, {"type": "fsdp"}),
    "fsdp-3": (3, {"type": "fsdp", "blocks": "layers.*"}),
    "fsdp-4": (4, {"type": "fsdp"}),
    "fsdp-kept-2": (2, {"type": "fsdp", "reshard_after_forward": False}),
    "hsdp-2x2": (4, {"type": "hsdp", "mesh": {"data": 2, "replica": 2}}),
    "tensor-2": (2, {"type": "tensor", "mesh": {"model": 2}, "shard": COLUMNS_AND_ROWS}),
    "tensor-2-split": (2, {"type": "tensor", "mesh": {"model": 2}, "shard": STAYING_SPLIT}),
    "fsdp-tensor-2x2": (4, {"type": "fsdp", "mesh": {"data": 2, "model": 2}, "shard": COLUMNS_AND_ROWS}),
    "data-tensor-2x2": (4, {"type": "tensor", "mesh": {"model": 2, "data": 2}, "shard": STAYING_SPLIT}),
}
SHORT = ("fsdp-3", "fsdp-tensor-2x2")


def same(mine: dict[str, list[float]], theirs: dict[str, list[float]], **how: float) -> bool:
    return mine.keys() == theirs.keys() and all(
        mine[name] == pytest.approx(theirs[name], **{"rel": 1e-4, "abs": 2e-6, **how}) for name in mine
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = launch(sharded_bodies.trained, processes=1, out=tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize(
    "mesh", [each if each in SHORT else pytest.param(each, marks=pytest.mark.long) for each in MESHES]
)
def test_a_mesh_gives_the_answer_of_one_process(mesh: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Token means, short batches, parts without an exchange, clipping by the true norm, groups, tied and frozen."""
    processes, strategy = MESHES[mesh]
    ranks = launch(sharded_bodies.trained, processes=processes, out=tmp_path, strategy=strategy)
    for found in ranks:
        assert found["first"] == alone["first"], "initial weights are those of one process, bit for bit"
        assert found["tied"] and found["step"] == alone["step"]
        assert same(found["weights"], alone["weights"])
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    if strategy["type"] == "fsdp":
        most = max(found["parts"] for found in ranks)
        assert most < alone["parts"] / processes * 1.15, "a rank keeps its part, and no more"


@pytest.mark.long
def test_bf16_is_computed_as_under_ddp(tmp_path: Path) -> None:
    body = partial(sharded_bodies.trained, precision="bf16")
    by_ddp = launch(body, processes=2, out=tmp_path / "ddp", strategy="ddp")
    split = launch(body, processes=2, out=tmp_path / "fsdp", strategy="fsdp")
    assert same(split[0]["weights"], by_ddp[0]["weights"], rel=1e-3, abs=1e-4)
    strategy = {"type": "fsdp", "param_dtype": "bf16"}
    rounded = launch(body, processes=2, out=tmp_path / "gather", strategy=strategy)
    assert rounded[0]["loss"] == pytest.approx(by_ddp[0]["loss"], rel=1e-2)
    assert rounded[0]["weights"] != split[0]["weights"]
    reduced = launch(body, processes=2, out=tmp_path / "reduced", strategy={"type": "fsdp", "reduce_dtype": "bf16"})
    assert reduced[0]["loss"] == pytest.approx(by_ddp[0]["loss"], rel=1e-2)
    assert reduced[0]["weights"] not in (split[0]["weights"], rounded[0]["weights"])


def test_methods_frozen_models_and_steps_that_are_skipped(tmp_path: Path) -> None:
    fsdp = "fsdp"
    (alone,) = launch(sharded_bodies.in_unusual_ways, processes=1, out=tmp_path)
    ranks = launch(sharded_bodies.in_unusual_ways, processes=2, out=tmp_path, strategy=fsdp)
    assert [found["without_memory"] for found in ranks] == [False, True], "only rank 0 ever holds the whole model"
    for found in ranks:
        assert same(found["after_nan"], alone["after_nan"])
        assert same(found["second"], alone["second"])


@pytest.mark.long
def test_optimizers_that_work_on_each_number_take_parts_of_parameters(tmp_path: Path) -> None:
    (alone,) = launch(sharded_bodies.optimizers, processes=1, out=tmp_path)
    mesh = {"type": "fsdp", "mesh": {"data": 1, "model": 2}, "shard": {"up.weight": ["model", None]}}
    first, _ = launch(sharded_bodies.optimizers, processes=2, out=tmp_path, strategy=mesh)
    for name, weights in first.items():
        assert same(weights, alone[name]), name


def test_a_model_that_is_never_whole_anywhere(tmp_path: Path) -> None:
    (alone,) = launch(sharded_bodies.made_without_memory, processes=1, out=tmp_path)
    first, second = launch(sharded_bodies.made_without_memory, processes=2, out=tmp_path, strategy="fsdp")
    assert first["first"] == second["first"] == alone["first"]
    assert same(first["weights"], alone["weights"]) and first["weights"] == second["weights"]


@pytest.mark.parametrize(
    ("what", "strategy", "message"),
    [
        ("LBFGS", {}, "optimizer: LBFGS cannot step parameters that strategy: fsdp splits.*AdamW, Adam, SGD"),
        ("OwnRprop", {}, "optimizer: OwnRprop cannot step parameters that strategy: fsdp splits.*index_put_.*AdamW"),
        ("sparse", {}, r"0\.weight: sparse gradients cannot be split over a mesh.*sparse=False"),
        ("", {"blocks": "layer.*"}, r"strategy.blocks: layer.\*: no module .* the nearest are layers"),
        ("", {"meshes": {"wide": {"data": 1}}, "shard": {"odd": {"spec": [None, None], "mesh": "wide"}}},
         "'odd' cannot be split .* there is one, strategy.mesh"),
        ("", {"param_dtype": "bf16"}, r"strategy.param_dtype: bf16 is .* its precision is float32: set train"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(
    what: str, strategy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(lockstep.errors.ConfigError, match=message):
        launch(
            partial(sharded_bodies.refused, what=what), processes=1, out=tmp_path,
            strategy={"type": "fsdp", **strategy},
        )  # fmt: skip


def test_a_parameter_between_layers_that_leave_activations_split_is_refused(tmp_path: Path) -> None:
    rules = {"0.weight": ["model", None], "2.weight": [None, "model"]}
    shard = {name: {"spec": spec, "activations": "split"} for name, spec in rules.items()}
    strategy = {"type": "tensor", "mesh": {"model": 2}, "shard": shard}
    with pytest.raises(lockstep.WorkerFailed, match=r"'1\.beta' lies between layers with activations: split"):
        launch(sharded_bodies.between, processes=2, out=tmp_path, strategy=strategy)


@pytest.mark.long
def test_a_mesh_of_ranks_that_exchange_through_the_host(alone: dict[str, Any], tmp_path: Path) -> None:
    mesh = {"type": "fsdp", "mesh": {"data": 2, "model": 2}, "shard": COLUMNS_AND_ROWS}
    for found in launch(through_host_bodies.trained, processes=4, out=tmp_path, strategy=mesh):
        assert found["first"] == alone["first"] and same(found["weights"], alone["weights"])
