"""How often a plan traces a step again, in search of the largest batch that fits."""

from __future__ import annotations

import pytest

from lockstep.planner.plan import GIB, _largest_batch
from planned_steps import plan, step


@pytest.mark.parametrize(
    ("seconds", "traced", "found"),
    [
        (3, [104, 216, 120], (120, True)),
        (25, [104, 216], (104, True)),
        (45, [104], (104, True)),
        (70, [], (104, False)),
    ],
)
def test_traces_in_search_of_the_largest_batch_are_as_many_as_a_minute_allows(
    seconds: float, traced: list[int], found: tuple[int, bool]
) -> None:
    """Memory that is not linear."""
    given, asked = step(world_size=8, batch=64, mesh={"data": 8}, seconds=seconds), []

    def peak_of(batch: int) -> int:
        asked.append(batch)
        return {104: 13 * GIB, 216: 22 * GIB, 120: 15 * GIB}[batch]

    assert (_largest_batch(plan(given), peak_of), asked) == (found, traced)


def test_a_batch_that_was_not_traced_is_told_as_such() -> None:
    """The only try does not fit, and the batch of the config is not the largest."""
    given = step(world_size=8, batch=64, mesh={"data": 8}, seconds=45)
    assert _largest_batch(plan(given), lambda batch: 17 * GIB) == (88, False)


def test_ranks_of_a_split_sequence_need_no_batch_of_their_own() -> None:
    """Two more sequences of 1.5 GiB fit, on 8 ranks."""
    given = step(world_size=8, batch=4, mesh={"data": 1, "context": 8})
    assert _largest_batch(plan(given), lambda batch: round((6 + 1.5 * batch) * GIB)) == (6, True)
