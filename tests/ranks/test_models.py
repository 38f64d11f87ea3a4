"""Several models and optimizers, means over tokens, and models that are used in unusual ways: the same on any ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import model_bodies
import pytest

import lockstep
from conftest import rows

launch = partial(lockstep.launch, runtime="cpu", log={"every": "1 step"})


def same(first: Any, second: Any) -> Any:
    return first == pytest.approx(second, rel=1e-5, abs=1e-6)


def test_means_over_tokens_are_exact_on_any_number_of_ranks_and_micro_batches(tmp_path: Path) -> None:
    """Batches of 8 sentences of 1 to 7 real tokens, the last of 5: on 1 to 4 ranks, in 1 to 3 micro-batches."""
    expected = model_bodies.token_means_by_hand()
    logged: dict[int, list[float]] = {}
    for processes in (1, 2, 3, 4):
        ranks = launch(model_bodies.token_means, processes=processes, folder=tmp_path / str(processes))
        for found in ranks:
            assert all(same(weights, expected) for weights in found["weights"].values()), processes
            assert found["accuracy"] == pytest.approx(ranks[0]["accuracy"], abs=1e-9)
        written = rows(tmp_path / str(processes))
        logged[processes] = [row[name] for row in written for name in row if name.startswith("in ")]
    assert len(logged[1]) == 18 and all(same(each, logged[1]) for each in logged.values())


def test_two_models_are_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    (alone,) = launch(model_bodies.two_models, processes=1, out=tmp_path)
    together = launch(model_bodies.two_models, processes=3, out=tmp_path)
    assert alone["step"] == 10
    for rank in together:
        assert rank["step"] == 10
        assert all(same(mine, theirs) for mine, theirs in zip(alone["weights"], rank["weights"], strict=True))


def test_a_batch_that_was_left_half_way_leaves_the_replicas_equal(tmp_path: Path) -> None:
    (alone,) = launch(model_bodies.left_half_way, processes=1, out=tmp_path)
    for strategy in ("ddp", "fsdp"):
        first, second = launch(model_bodies.left_half_way, processes=2, out=tmp_path, strategy=strategy)
        assert first == second and same(first, alone)


def test_sparse_gradients_are_averaged_clipped_and_checked(tmp_path: Path) -> None:
    (alone,) = launch(model_bodies.sparse_embedding, processes=1, out=tmp_path)
    first, second = launch(model_bodies.sparse_embedding, processes=2, out=tmp_path)
    assert first == second and same(first, alone)


def test_a_collective_in_the_forward_pass_is_met_by_all_ranks_at_a_short_batch(tmp_path: Path) -> None:
    limits = {"collective": "20 s"}
    assert launch(model_bodies.collective_in_forward, processes=2, out=tmp_path, timeouts=limits) == [2, 2]


def test_other_methods_of_a_model_work_through_its_wrapper(tmp_path: Path) -> None:
    (alone,) = launch(model_bodies.other_methods, processes=1, out=tmp_path)
    first, second = launch(model_bodies.other_methods, processes=2, out=tmp_path)
    assert first == second
    assert all(same(mine, theirs) for mine, theirs in zip(alone["weights"], first["weights"], strict=True))
    assert (first["code"], first["width"]) == (2, 2)


def test_parameters_without_a_gradient_are_named_with_the_backward_pass_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(model_bodies.unused_parameters, processes=2, out=tmp_path)
    assert "unused.weight, unused.bias: no gradient on rank" in str(failed.value)
    assert "in backward pass 1 of this step" in str(failed.value)
    assert "call run.backward once, or set strategy.find_unused_parameters: true" in str(failed.value)


def test_a_batch_size_that_the_ranks_do_not_divide_trains_the_same(tmp_path: Path) -> None:
    (alone,) = launch(model_bodies.uneven_shares, processes=1, out=tmp_path)
    for each in launch(model_bodies.uneven_shares, processes=4, out=tmp_path):
        assert same(each, alone)
