"""Where a run is, when something is due, and generators that go on where they were."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.values import Interval
from lockstep.data.cursors import Due, Progress
from lockstep.runtime.base import generator_states, seed_generators, set_generator_states
from lockstep.runtime.cpu import CpuRuntime


@pytest.mark.requirement("D01")
def test_progress_exists_before_training() -> None:
    assert Progress() == Progress(epoch=0, step=0, batch=0, examples=0, epoch_ended=False)


def test_progress_comes_back_from_its_state() -> None:
    progress, restored = Progress(epoch=2, step=31, batch=4, examples=992, epoch_ended=True), Progress()
    restored.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert restored == progress


def steps_due(every: str | None, steps: int = 12, per_epoch: int = 4, seconds_per_step: float = 1.0) -> list[int]:
    due = Due(None if every is None else Interval.parse(every))
    found = []
    for step in range(1, steps + 1):
        progress = Progress(epoch=(step - 1) // per_epoch, step=step, epoch_ended=step % per_epoch == 0)
        if due.now(progress, step * seconds_per_step):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, []),
        ("1 step", list(range(1, 13))),
        ("5 steps", [5, 10]),
        ("20 steps", []),
        ("1 epoch", [4, 8, 12]),
        ("2 epochs", [8]),
        ("3 seconds", [3, 6, 9, 12]),
        ("3.5 seconds", [4, 8, 12]),
        ("0.1 seconds", list(range(1, 13))),
        ("1 minute", []),
    ],
)
def test_an_interval_is_due_when_it_has_passed(every: str | None, expected: list[int]) -> None:
    assert steps_due(every) == expected


def test_an_epoch_is_due_at_its_end_and_not_within_the_next() -> None:
    due = Due(Interval(1, "epoch"))
    assert due.now(Progress(epoch=1, step=4, epoch_ended=True), 0.0)
    assert not due.now(Progress(epoch=1, step=5, epoch_ended=False), 0.0)


def test_steps_are_due_by_their_number_wherever_a_run_was_resumed() -> None:
    assert not Due(Interval(5, "step")).now(Progress(step=7), 0.0)
    assert Due(Interval(5, "step")).now(Progress(step=10), 0.0)


# Generators


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torchs)


def draw() -> list[Any]:
    """From every generator; normal numbers come in pairs, of which the second is kept for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    ]


def test_generators_go_on_where_they_were() -> None:
    runtime = CpuRuntime()
    seed_generators(runtime, 3, 1)
    draw()
    states = json.loads(json.dumps(generator_states(runtime)))
    expected = [draw(), draw()]
    seed_generators(runtime, 99)
    draw()
    set_generator_states(runtime, states)
    assert [draw(), draw()] == expected


def test_without_a_rank_generators_are_seeded_alike_and_with_one_differently() -> None:
    runtime = CpuRuntime()

    def first(seed: int, *rank: int) -> list[Any]:
        seed_generators(runtime, seed, *rank)
        return draw()

    assert first(5) == first(5)
    drawn = [first(5), first(6), *(first(5, rank) for rank in range(4)), first(6, 0)]
    for place in range(len(drawn[0])):
        assert len({str(each[place]) for each in drawn}) == len(drawn)


@pytest.mark.parametrize("seed", [0, 2**31, 2**32, 2**63 - 1])
def test_every_seed_that_a_config_may_name_can_be_used(seed: int) -> None:
    seed_generators(CpuRuntime(), seed, 1000)
