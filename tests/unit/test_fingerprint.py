"""A fingerprint changes with any bit of any parameter, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from lockstep.distributed.group import Group
from lockstep.runtime.cpu import CpuRuntime
from lockstep.strategy.base import Strategy
from lockstep.strategy.fingerprint import compare, difference, digests, fingerprint, marks_of_weights

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int8,
    torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (5, 7)], ids=str)
def test_one_changed_element_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    before = fingerprint({"w": tensor})
    assert fingerprint({"w": tensor.clone()}) == before
    tensor.view(-1)[-1] = 0
    assert fingerprint({"w": tensor}) != before


def test_the_last_bit_counts() -> None:
    tensor = torch.randn(1000)
    before = fingerprint({"w": tensor})
    tensor.view(torch.int32)[500] ^= 1
    assert fingerprint({"w": tensor}) != before


def test_memory_that_is_not_in_one_piece() -> None:
    tensor = torch.randn(6, 8).t()
    before = fingerprint({"w": tensor})
    tensor[3, 2] += 1e-6
    assert fingerprint({"w": tensor}) != before
    part = torch.randn(9)[1:]  # does not begin at a whole word
    assert len(fingerprint({"w": part})) == 1


def test_weights_of_a_kind_without_a_fingerprint_are_not_compared() -> None:
    model, strategy = torch.nn.Linear(1, 1), Strategy(CpuRuntime())
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    assert marks_of_weights(strategy, {"model": model}) is not None
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    assert marks_of_weights(strategy, {"model": model}) is None


def test_no_parameters() -> None:
    assert fingerprint({}) == []
    compare(Group(0, 1, 1.0), [], [], [], [digests([], [])], 3)


def test_the_order_of_parameters_counts() -> None:
    assert digests([1, 2], []) != digests([2, 1], [])


def test_only_what_the_same_ranks_have_is_compared() -> None:
    """A parameter that all ranks have, and one that ranks 0 and 2 have a part of, and ranks 1 and 3 another."""
    even, odd = digests([7, 1], [(0, 1, 2, 3), (0, 2)]), digests([7, 5], [(0, 1, 2, 3), (1, 3)])
    assert set(even) == {"0,1,2,3", "0,2"} and even["0,1,2,3"] == odd["0,1,2,3"]
    alone = Group(0, 1, 1.0)
    compare(alone, ["a", "b"], [7, 1], [(0, 1, 2, 3), (0, 2)], [even, odd, even, odd], 3)


@pytest.mark.parametrize(
    ("found", "world_size", "who"),
    [
        ({0: 5, 1: 5, 2: 7, 3: 5}, 4, "differs on rank 2 from the others"),
        ({0: 5, 1: 7}, 2, "between all ranks"),
        ({0: 1, 1: 2, 2: 3}, 3, "between all ranks"),
        ({1: 5, 3: 7}, 4, "between ranks 1, 3"),
        ({0: 5, 1: 7}, 4, "between ranks 0, 1"),
    ],
)
def test_the_odd_one_out_is_named_where_there_is_a_majority(found: dict[int, int], world_size: int, who: str) -> None:
    text = difference(12, "layers.0.weight", found, world_size)
    assert who in text
    assert "at step 12" in text and "'layers.0.weight'" in text
