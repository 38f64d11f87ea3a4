"""Ramps: the sizes that a config says, and the batches of them on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.config.changes import changes, refuse_wrong_changes
from lockstep.config.load import validate
from lockstep.config.schema import RunConfig, Train
from lockstep.config.training import Sizes
from lockstep.data.batches import GlobalBatches, Position, Ramps
from lockstep.errors import ConfigError


def train(**values: Any) -> Train:
    return validate(RunConfig, {"task": "a:B", "train": values}, {}, "config").train


def test_a_ramp_rises_in_equal_parts_and_stages_are_as_they_say() -> None:
    by_steps = train(batch_size=32, batch_ramp={"start": 8, "steps": 10}).batch_sizes
    assert by_steps is not None
    assert [by_steps.at(step, 0) for step in range(12)] == [8, 8, 8, 16, 16, 16, 24, 24, 24, 24, 32, 32]
    stages: Any = [{"size": 20, "tokens": 1e3}, {"size": 30, "tokens": "5e2"}, {"size": 10}]
    by_tokens = train(sequence_ramp=stages).sequence_lengths
    assert by_tokens is not None
    assert [by_tokens.at(0, tokens) for tokens in (0, 999, 1000, 1499, 1500, 10**9)] == [20, 20, 30, 30, 10, 10]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"epochs": 1, "tokens": 5}, r"give epochs or tokens, not both \(epochs: 1, tokens: 5\)"),
        ({"epochs": 1, "steps": 2, "tokens": 5}, "give epochs or steps or tokens, not all"),
        ({"tokens": 1.5}, "train.tokens"),
        ({"batch_ramp": {"start": 8}}, "batch_ramp: give its steps or its tokens"),
        ({"batch_ramp": {"start": 8, "steps": 3, "tokens": 9}}, "batch_ramp: give its steps or its tokens"),
        ({"batch_ramp": {"start": 9, "steps": 3}}, "batch_ramp: 9 cannot rise to 32 by 9 at a time, in 3 steps"),
        ({"batch_ramp": {"start": 32, "steps": 3}}, "batch_ramp: 32 cannot rise to 32"),
        ({"batch_ramp": {"start": 1, "steps": 10}}, "1 cannot rise to 32 by 1 at a time, in 10 steps"),
        ({"batch_ramp": {"start": 8, "end": 16, "steps": 3}}, "it ends at 16, but batch_size is 32"),
        ({"batch_ramp": [{"size": 64, "steps": 3}, {"size": 32}]}, "it ends at 32, but batch_size is 32"),
        ({"batch_ramp": [{"size": 8, "steps": 3}, {"size": 32, "steps": 3}]}, "all but the last have steps"),
        ({"batch_ramp": [{"size": 8, "steps": 3}, {"size": 9, "tokens": 3}, {"size": 32}]}, "or all have tokens"),
        ({"sequence_ramp": {"start": 8, "steps": 3}}, "sequence_ramp: 8 cannot rise to no end"),
        ({"sequence_ramp": [{"size": 8}]}, "sequence_ramp"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(**values)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("leaves", [None, 4])
def test_the_same_batches_on_any_number_of_ranks_from_any_position(fill: bool, leaves: int | None) -> None:
    """Every example once in its batch, whose micro-batches are as large as those of the largest."""
    rng = np.random.default_rng(0)
    ramps = Ramps(Sizes(True, (120, 300), (6, 12, 24)), Sizes(False, (5,), (3, 9)), rng.integers(1, 10, 70))
    plans = {
        ranks: [GlobalBatches(70, 24, rank, ranks, accumulate=2, fill=fill, leaves=leaves, ramps=ramps)
                for rank in range(ranks)]
        for ranks in ((1, 2, 4) if leaves else (1, 2, 3))
    }  # fmt: skip
    at, seen = Position(), 0
    for epoch in range(2):
        whole = list(plans[1][0].micro_batches(epoch, at))
        tokens = at.tokens
        for ranks, of_ranks in plans.items():
            micros = [list(each.micro_batches(epoch, at)) for each in of_ranks]
            for batch in range(whole[-1].batch + 1):
                here = [[each for each in of_rank if each.batch == batch] for of_rank in micros]
                one = next(each for each in whole if each.batch == batch)
                assert len({len(each) for each in here}) == 1
                assert sum(each.examples for of_rank in here for each in of_rank) == one.whole
                assert {each.after for of_rank in here for each in of_rank} == {one.after}
                assert sum(each.weight for of_rank in here for each in of_rank) == pytest.approx(1 if leaves else ranks)
                parts = {len(each.indices) for of_rank in here for each in of_rank}
                assert max(parts) <= -(-24 // (2 * (leaves or ranks))) and (not fill or leaves or len(parts) == 1)
                if one.whole == 6 and not one.completes_epoch:  # of 24 in two micro-batches
                    assert {len({each.number for each in of_rank}) for of_rank in here} == {(leaves or ranks) // ranks}
                # What is left from here on is the same as after a restart.
                if ranks == 2 and one.after is not None and not one.completes_epoch:
                    again = list(of_ranks[0].micro_batches(epoch, one.after))
                    rest = [each for each in micros[0] if each.batch > batch]
                    assert [(each.indices.tolist(), each.whole, each.tokens) for each in again] == [
                        (each.indices.tolist(), each.whole, each.tokens) for each in rest
                    ]
        assert whole[-1].completes_epoch and whole[-1].after is not None
        assert whole[-1].after.tokens - tokens == sum({each.batch: each.tokens for each in whole}.values())
        at = whole[-1].after._replace(batch=0, begin=0)
        seen += sum({each.batch: each.whole for each in whole}.values())
    assert seen == 140 and at.steps > 7


def test_a_ramp_may_not_change_on_a_resume_but_the_limit_may() -> None:
    def plain(**values: Any) -> dict[str, Any]:
        return validate(RunConfig, {"task": "a:B", "train": values}, {}, "config").plain()

    before = plain(tokens=100, batch_ramp={"start": 8, "steps": 9})
    longer = plain(tokens=200, batch_ramp={"start": 8, "steps": 9})
    refuse_wrong_changes(changes(before, longer), longer)
    for other in (plain(tokens=100), plain(tokens=100, batch_ramp={"start": 16, "steps": 9})):
        with pytest.raises(ConfigError, match=r"train\.batch_ramp.*counted in batches of these sizes"):
            refuse_wrong_changes(changes(before, other), other)
