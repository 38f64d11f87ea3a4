"""A user's own function splits the model in place of Lockstep, and all else works as it does without one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import parallelize_bodies
import pytest
import sharded_bodies
from test_sharded import launch, same

from lockstep.errors import ConfigError

MESH = {"type": "fsdp", "mesh": {"data": 2, "model": 2}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = launch(sharded_bodies.trained, processes=1, out=tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize(
    ("function", "strategy"),
    [
        ("like_torchtitan", MESH),
        pytest.param("tensor_parallel_alone", MESH, marks=pytest.mark.long),
        pytest.param("tensor_parallel_alone", {**MESH, "type": "tensor"}, marks=pytest.mark.long),
    ],
)
def test_training_is_that_of_one_process(
    function: str, strategy: dict[str, Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    """Accumulation, token means, clipping by the true norm, tied and frozen parameters, evaluation, replicas."""
    body = partial(sharded_bodies.trained, parallelize=getattr(parallelize_bodies, function))
    for found in launch(body, processes=4, out=tmp_path, strategy=strategy):
        assert found["first"] == alone["first"] and found["tied"]
        assert same(found["weights"], alone["weights"])
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a_checkpoint_is_resumed_with_it_and_without_it(tmp_path: Path) -> None:
    """Ranks of one slice go on with its random numbers; with other slices, all ranks begin with new ones."""
    (alone,) = launch(partial(parallelize_bodies.continued, epochs=3), processes=1, out=tmp_path)
    own = parallelize_bodies.like_torchtitan
    folder = tmp_path / "run"
    first = launch(partial(parallelize_bodies.continued, epochs=1, parallelize=own), 4, folder=folder, strategy=MESH)
    second = launch(partial(parallelize_bodies.continued, epochs=2), 2, folder=folder, strategy="ddp")
    assert [each["drawn"] for each in second] == [first[0]["next"], first[2]["next"]] != [first[0]["next"]] * 2
    other = {**MESH, "mesh": {"data": 1, "model": 2}}
    ranks = launch(partial(parallelize_bodies.continued, epochs=3, parallelize=own), 2, folder=folder, strategy=other)
    for found in ranks:
        assert same(found["weights"], alone["weights"])
        assert found["drawn"] == ranks[0]["drawn"] not in [each["next"] for each in second]


@pytest.mark.parametrize(
    ("function", "strategy", "message"),
    [
        ("a_wrapper", {}, r"a_wrapper returned another module \(DistributedDataParallel\).*fully_shard"),
        ("a_plain_part", {}, r"a_plain_part: odd has the shape \(3, 5\) in place of \(7, 5\).*DTensor"),
        pytest.param("compiled", {}, r"compiled: layers\.0\..* checkpoints go by names: use module.compile\(\)",
                     marks=pytest.mark.long),
        ("without_the_data_axis", {"mesh": {"data": 2, "model": 1}},
         r"layers\.0\.up\.weight is on a mesh without the data axis"),
        ("like_torchtitan", {"shard": {"odd": ["data", None]}}, r"strategy\.shard is about how Lockstep splits"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(
    function: str, strategy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    body = partial(sharded_bodies.trained, parallelize=getattr(parallelize_bodies, function))
    with pytest.raises(Exception, match=message) as raised:
        launch(body, processes=2, out=tmp_path, strategy={"type": "fsdp", **strategy})
    assert getattr(raised.value, "exit_code", None) == ConfigError.exit_code
