"""The tree of gradients, the leaves of a batch, and sums that are rounded once."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.load import validate
from lockstep.config.schema import RunSettings
from lockstep.data.batches import GlobalBatches
from lockstep.errors import ConfigError
from lockstep.record.meters import added_up, parts_of
from lockstep.runtime.deterministic import deterministic, explained
from lockstep.strategy.leaves import LeafTree


def tree_sum(leaves: list[torch.Tensor]) -> torch.Tensor:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_neighbours_are_added_first(count: int) -> None:
    torch.manual_seed(count)
    leaves = [torch.randn(1000) * 10**index for index in range(count)]
    tree = LeafTree(count)
    for leaf in leaves:
        tree.add({"w": leaf.clone()})
    assert torch.equal(tree.finish()["w"], tree_sum(leaves))
    assert tree.is_empty and tree.taken == 0


def test_a_leaf_without_a_gradient_counts_as_zero() -> None:
    tree = LeafTree(4)
    tree.skip_to(1)
    tree.add({"w": torch.tensor([-0.0, 2.0])})
    (found,) = tree.finish().values()
    assert found.tolist() == [0.0, 2.0] and not math.copysign(1, found[0]) < 0


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_leaves_are_the_same_on_any_number_of_ranks(count: int, batch_size: int, ranks: int, accumulate: int) -> None:
    def leaves(rank: int, world_size: int) -> list[tuple[int, int, int, float, list[int]]]:
        plan = GlobalBatches(count, batch_size, rank, world_size, accumulate=accumulate, leaves=8)
        return [
            (each.batch, each.leaf, each.examples, each.weight, each.indices.tolist()) for each in plan.micro_batches(3)
        ]

    alone = leaves(0, 1)
    assert sorted(each for rank in range(ranks) for each in leaves(rank, ranks)) == sorted(alone)
    assert sum(each[2] for each in alone) == count
    weights = np.bincount([each[0] for each in alone], weights=[each[3] for each in alone])
    assert weights == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30), st.randoms())
def test_a_sum_over_ranks_is_rounded_once(values: list[float], shuffled: random.Random) -> None:
    ranks: list[list[float]] = [[], [], []]
    for value in values:
        shuffled.choice(ranks).append(value)
    try:
        expected = math.fsum(values)
    except OverflowError:
        return
    found = added_up({"loss": [parts_of(rank), [1.0]]} for rank in ranks)
    assert found["loss"][0] == expected


def test_numbers_that_are_not_finite_stay_so() -> None:
    found = added_up([{"loss": [parts_of([1.0, math.inf]), [1.0]]}, {"loss": [parts_of([-math.inf]), [1.0]]}])
    assert math.isnan(found["loss"][0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processes": 3}, "8 leaves cannot be divided among 3 processes: use 1, 2, 4, 8"),
        ({"processes": 16}, "use 1, 2, 4, 8, or set train.exact to 16"),
        ({"strategy": "fsdp"}, "cannot be used with strategy: fsdp"),
        ({"strategy": {"type": "ddp", "comm_hook": "bf16_compress"}}, "cannot be used with strategy.comm_hook"),
        ({"strategy": {"type": "ddp", "sync_batchnorm": True}}, "each leaf has its own statistics"),
        ({"runtime": "xla"}, "cannot be used with runtime: xla"),
        ({"train": {"exact": 6}}, "a power of two"),
    ],
)
def test_what_it_does_not_go_with_is_named_before_anything_starts(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RunSettings, {"train": {"exact": True}, **given}, {}, "config.yaml")


def test_deterministic_runs_have_the_same_number_of_threads_everywhere() -> None:
    assert validate(RunSettings, {"train": {"exact": True}}, {}, "").launch.threads == 1
    assert (
        validate(RunSettings, {"train": {"deterministic": True}, "launch": {"threads": 3}}, {}, "").launch.threads == 3
    )
    assert validate(RunSettings, {}, {}, "").launch.threads is None


def test_deterministic_algorithms_are_on_inside_and_what_has_none_is_named() -> None:
    with deterministic("cpu"):
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()
    meant = explained(caught.value)
    assert meant is not None and str(meant).startswith("train.deterministic: put_ has no deterministic form")
    assert explained(RuntimeError("another")) is None
