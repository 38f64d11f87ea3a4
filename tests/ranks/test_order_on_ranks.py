"""Orders on real processes: every rank has its share of one order, also after a restart on another number of ranks."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import order_bodies
import pytest

import lockstep
from lockstep.data.order import choose

launch = partial(lockstep.launch, runtime="cpu")


def test_orders_are_exact_on_two_ranks_and_when_they_go_on_as_three(tmp_path: Path) -> None:
    first = launch(order_bodies.walk_for_a_while, processes=2, folder=tmp_path / "run")
    rest = launch(order_bodies.walk, processes=3, folder=tmp_path / "run")
    for name, asked in order_bodies.ORDERS.items():
        batches = [sorted(itertools.chain(*parts)) for ranks in (first, rest)
                   for parts in zip(*(each[name] for each in ranks), strict=True)]  # fmt: skip
        order = choose(asked, True, range(51), 12, 0)
        whole = [order.at(epoch, np.arange(order.length)) for epoch in range(2)]
        assert batches == [sorted(each[start : start + 12].tolist()) for each in whole
                           for start in range(0, order.length, 12)]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (order_bodies.another_order_each, "examples '.*' on rank 0, '.*' on rank 1"),
        (order_bodies.other_data_each, "count 51 on rank 0, 52 on rank 1"),
    ],
)
def test_ranks_that_do_not_have_the_same_order_are_told_apart(tmp_path: Path, body: Any, told: str) -> None:
    with pytest.raises(lockstep.WorkerFailed, match=f"the ranks do not have the same order of source 1: .*{told}"):
        launch(body, processes=2, out=tmp_path)
