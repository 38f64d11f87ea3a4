"""Means that count every example once, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.evaluation.means import BatchMean, combine, evaluating, measure_sums


def measured(values: Tensor, batch_size: int, world_size: int, measure: Any) -> dict[str, float]:
    """The means as all ranks together compute them."""
    parts = []
    for rank in range(world_size):
        plan = GlobalBatches(len(values), batch_size, rank, world_size, shuffle=False)
        parts.append(measure_sums(measure, Loader(TensorDataset(values), plan).epoch(0), lambda batch: batch))
    return combine(parts, len(values), "validation")


@pytest.mark.requirement("D04")
@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=60),
    batch_size=st.integers(1, 70),
    world_size=st.integers(1, 7),
)
def test_a_mean_does_not_depend_on_ranks_or_batches(values: list[int], batch_size: int, world_size: int) -> None:
    data = torch.tensor(values, dtype=torch.float32)
    means = measured(
        data,
        batch_size,
        world_size,
        lambda batch: {"each": batch[0], "loss": BatchMean(batch[0].mean()), "right": batch[0] > 0},
    )
    assert means["each"] == sum(values) / len(values), "whole numbers add up exactly"
    assert means["loss"] == pytest.approx(sum(values) / len(values), rel=1e-5, abs=1e-4)
    assert means["right"] == sum(value > 0 for value in values) / len(values)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mean_that_some_batches_have_is_over_those(world_size: int) -> None:
    values = torch.arange(8.0)
    found = {True: lambda x: {"big": BatchMean(x.mean())}, False: lambda x: {}}
    assert measured(values, 2, world_size, lambda batch: found[bool(max(batch[0]) > 5)](batch[0])) == {"big": 6.5}
    with pytest.raises(ConfigError, match="'big' is there for 1 of 4 batches: return it for each"):
        measured(values, 2, 1, lambda batch: {"big": batch[0]} if max(batch[0]) > 5 else {})


def test_sums_are_taken_in_double_precision() -> None:
    values = torch.cat([torch.full((1,), 1e8), torch.ones(1000)])
    mean = measured(values, 10, 1, lambda batch: {"each": batch[0]})["each"]
    assert mean == (1e8 + 1000) / 1001


def test_a_rank_without_examples_measures_nothing() -> None:
    calls: list[int] = []
    plan = GlobalBatches(1, 4, rank=0, world_size=2)
    sums = measure_sums(
        lambda batch: calls.append(1) or {}, Loader(TensorDataset(torch.ones(1)), plan).epoch(0), lambda x: x
    )
    assert (sums, calls) == (({}, 0), [])


def test_batches_are_moved_before_they_are_measured() -> None:
    loader = Loader(TensorDataset(torch.ones(2)), GlobalBatches(2, 2))
    sums, seen = measure_sums(lambda batch: {"x": batch[0]}, loader.epoch(0), lambda batch: [batch[0] * 10])
    assert (sums, seen) == ({"x": [[20.0], [2.0]]}, 2)


def test_nothing_is_kept_for_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    states = []

    def measure(batch: Any) -> dict[str, Tensor]:
        states.append((weight * batch[0]).requires_grad)
        return {"x": batch[0]}

    measured(torch.ones(2), 2, 1, measure)
    assert states == [False]


def test_examples_that_were_not_measured_are_noticed() -> None:
    with pytest.raises(AssertionError, match="validation: 7 examples were measured, the dataset has 8"):
        combine([({"loss": [[1.0], [4.0]]}, 4), ({"loss": [[1.0], [3.0]]}, 3)], 8, "validation")


@pytest.mark.parametrize("shape", [(4, 2), (3,), (1,), (4, 1)])
def test_a_metric_with_more_or_less_than_a_value_per_example_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"metric 'wrong' has shape .* for a batch of 4 examples.* shape \[B\]"):
        measured(torch.ones(4), 4, 1, lambda batch: {"wrong": torch.ones(shape)})


@pytest.mark.parametrize("value", [0.5, 1, True, [1.0, 2.0]])
def test_a_metric_that_is_no_tensor_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="metric 'wrong'"):
        measured(torch.ones(2), 2, 1, lambda batch: {"wrong": value})


def test_afterwards_every_module_is_in_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    model[1][0].eval()  # a layer that the user has frozen
    before = [module.training for module in model.modules()]
    with evaluating([model]):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="inside"), evaluating([model]):
        raise ValueError("inside")
    assert [module.training for module in model.modules()] == before
