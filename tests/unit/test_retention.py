"""Which checkpoints are kept."""

from __future__ import annotations

import dataclasses
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.retention import Saved, best_first, to_delete


def saved(*values: float | None) -> list[Saved]:
    """Checkpoints of steps 1, 2, ... with these values."""
    return [Saved(step, value) for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "last", "best", "mode", "deleted"),
    [
        pytest.param([], 1, 1, "min", [], id="nothing there"),
        pytest.param([3.0], 1, 1, "min", [], id="the only one"),
        pytest.param([3.0, 1.0, 2.0], 1, 1, "min", [1], id="the newest and the lowest"),
        pytest.param([3.0, 1.0, 2.0], 1, 1, "max", [2], id="the newest and the highest"),
        pytest.param([1.0, 2.0, 3.0, 4.0], 2, 1, "min", [2], id="two of the newest"),
        pytest.param([4.0, 3.0, 2.0, 1.0], 2, 2, "min", [1, 2], id="the best among the newest count once"),
        pytest.param([1.0, 2.0, 3.0], 1, 0, "min", [1, 2], id="keep_best=0"),
        pytest.param([1.0, 1.0, 1.0], 1, 1, "min", [2], id="of equals the earlier is the best"),
        pytest.param([1.0, 1.0, 1.0], 1, 1, "max", [2], id="of equals the earlier is the best, max"),
        pytest.param([nan, 2.0, 3.0], 1, 1, "min", [1], id="NaN is never the best"),
        pytest.param([nan, 2.0, 3.0], 1, 1, "max", [1, 2], id="NaN is never the best, max"),
        pytest.param([nan, nan, nan], 1, 1, "min", [1, 2], id="nothing but NaN"),
        pytest.param([None, 2.0, None], 1, 1, "min", [1], id="without a value never the best"),
        pytest.param([None, None, None], 2, 1, "min", [1], id="nothing measured"),
        pytest.param([0.0, -1.0, 1.0], 1, 1, "min", [1], id="zero is a value"),
        pytest.param([inf, 5.0, 6.0], 1, 2, "min", [1], id="infinite is the worst"),
        pytest.param([-inf, 5.0, 6.0], 1, 1, "min", [2], id="minus infinite is the lowest"),
        pytest.param([1.0, 2.0], 5, 5, "min", [], id="fewer than are kept"),
    ],
)
def test_what_is_deleted(values: list[float | None], last: int, best: int, mode: str, deleted: list[int]) -> None:
    assert to_delete(saved(*values), last, best, mode) == deleted


@pytest.mark.parametrize(
    ("there", "last", "best", "deleted"),
    [
        pytest.param([(5, True), (10, False)], 1, 0, [], id="the only good one is older than a damaged one"),
        pytest.param([(5, True), (6, True), (10, False)], 1, 0, [5], id="the newest good one stays"),
        pytest.param([(5, False), (6, True), (7, True)], 1, 0, [6], id="a damaged older one is left alone"),
        pytest.param([(5, False), (6, False)], 1, 1, [], id="nothing is good"),
        pytest.param([(1, False), (2, True), (3, True)], 1, 1, [], id="a damaged one is not the best"),
        pytest.param([(1, True), (2, True)], 0, 0, [1], id="whatever is asked for, one stays"),
    ],
)
def test_what_is_damaged_is_neither_counted_nor_deleted(
    there: list[tuple[int, bool]], last: int, best: int, deleted: list[int]
) -> None:
    found = [Saved(step, float(step), whole) for step, whole in there]
    assert to_delete(found, last, best, "min") == deleted


def test_best_first() -> None:
    order = [each.step for each in best_first(saved(2.0, None, 1.0, nan, 2.0), "min")]
    assert order == [3, 1, 5]


@settings(deadline=None)
@given(
    values=st.lists(st.none() | st.floats(), max_size=12),
    damaged=st.sets(st.integers(1, 12)),
    last=st.integers(1, 5),
    best=st.integers(0, 5),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_newest_good_always_stay_and_no_more_than_asked_for(
    values: list[float | None], damaged: set[int], last: int, best: int, mode: str
) -> None:
    there = [dataclasses.replace(each, whole=each.step not in damaged) for each in saved(*values)]
    good = [each.step for each in there if each.whole]
    deleted = to_delete(there, last, best, mode)
    kept = [step for step in good if step not in deleted]
    assert set(deleted) <= set(good)
    assert set(good[-last:]) <= set(kept)
    assert len(kept) <= last + best
