"""What a step takes at least: which links an exchange goes by."""

from __future__ import annotations

import pytest

from lockstep.planner.devices import target
from lockstep.planner.plan import Collective, peak, seconds

GB = 10**9


def test_an_axis_within_hosts_goes_by_their_links() -> None:
    sixteen = target("h200x16")
    within = Collective("reduce_scatter_base", "data", ranks=8, span=8, count=1, bytes=8 * GB)
    across = Collective("allreduce", "replica", ranks=2, span=9, count=1, bytes=8 * GB)
    assert seconds(within, sixteen) == pytest.approx(7 / 450)
    assert seconds(across, sixteen) == pytest.approx(2 * 4 / 50)
    assert seconds(Collective("allreduce", "data", 1, 1, 1, GB), sixteen) == 0


def test_products_go_by_the_type_of_their_numbers() -> None:
    one = target("h200")
    assert peak(one, "bfloat16", "bf16") == 989.5e12
    assert peak(one, "float32", "tf32") == 494.5e12 and peak(one, "float32", "float32") == 67e12
    assert peak(target("t4"), "bfloat16", "bf16") == 8.1e12, "it has no bf16"
