"""Options that a config has by name change no number that they are not meant to change, on several ranks."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import bodies
import numpy as np
import option_bodies
import pytest

import lockstep
from lockstep.launchers.local import fork_server


def trained(out: Path, processes: int, how: dict[str, Any] | None = None, **strategy: Any) -> dict[str, Any]:
    """The weights and buffers of rank 0 at the end."""
    found: list[dict[str, Any]] = lockstep.launch(
        functools.partial(option_bodies.train, **(how or {})), processes=processes, runtime="cpu", out=out,
        strategy={"type": "ddp", "bucket_mb": 1, **strategy} if processes > 1 else "single",
    )  # fmt: skip
    return found[0]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.requirement("D02")
def test_a_static_graph_and_bucket_views_change_no_bit_on_three_ranks(tmp_path: Path) -> None:
    """From three ranks on, a sum depends on the order in which it is made, and that on the layout of the buckets."""
    plain = trained(tmp_path, 3)
    assert_equal(trained(tmp_path, 3, static_graph=True, gradient_as_bucket_view=True), plain)


@pytest.mark.long
def test_a_static_graph_may_leave_parameters_unused(tmp_path: Path) -> None:
    plain = trained(tmp_path, 2, {"unused": True}, find_unused_parameters=True)
    assert_equal(trained(tmp_path, 2, {"unused": True}, static_graph=True), plain)


@pytest.mark.long
def test_a_static_graph_refuses_to_accumulate(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed, match="set accumulate to 1, or static_graph to false"):
        trained(tmp_path, 2, {"accumulate": 2}, static_graph=True)


def test_batchnorm_over_all_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    alone = trained(tmp_path, 1)
    together = trained(tmp_path, 2, sync_batchnorm=True)
    assert together.keys() == alone.keys()
    for name, each in alone.items():
        assert np.allclose(together[name], each, rtol=0, atol=2e-6), name


@pytest.mark.long
def test_a_hook_of_ones_own_exchanges_the_gradients(tmp_path: Path) -> None:
    """Of two numbers, the sum halved is the sum of the halves: bit for bit what DDP does by itself."""
    assert_equal(trained(tmp_path, 2, comm_hook="option_bodies:plain_sum"), trained(tmp_path, 2))


def test_power_sgd_keeps_replicas_equal(tmp_path: Path) -> None:
    hook = {"type": "powerSGD", "start": 2}
    first, second = lockstep.launch(
        option_bodies.train, processes=2, runtime="cpu", out=tmp_path,
        strategy={"type": "ddp", "bucket_mb": 1, "comm_hook": hook, "sync_batchnorm": True},
    )  # fmt: skip
    assert_equal(first, second)
    plain = trained(tmp_path, 2, sync_batchnorm=True)
    assert not np.array_equal(first["second.weight"], plain["second.weight"]), "it did not compress"


@pytest.mark.long
def test_a_run_that_compresses_gradients_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path, 2, comm_hook="bf16_compress")
    run = functools.partial(
        lockstep.launch, processes=2, runtime="cpu", folder=tmp_path / "run",
        strategy={"type": "ddp", "bucket_mb": 1, "comm_hook": "bf16_compress"},
    )  # fmt: skip
    run(functools.partial(option_bodies.train, steps=4, save_at=4))
    assert_equal(run(functools.partial(option_bodies.train))[0], whole)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"], ids=["ddp", "fsdp"])
def test_an_average_is_the_same_on_any_number_of_ranks(tmp_path: Path, strategy: Any) -> None:
    def measured(processes: int, strategy: Any) -> dict[str, float]:
        found: list[dict[str, float]] = lockstep.launch(
            option_bodies.averaged, processes=processes, runtime="cpu", out=tmp_path, strategy=strategy
        )
        return found[0]

    alone, together = measured(1, "single"), measured(2, strategy)
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone["ema/error"] != pytest.approx(alone["error"], rel=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which library it is")
def test_every_thread_of_a_rank_has_the_number_of_this_launch(tmp_path: Path) -> None:
    """Gloo's threads compute for powerSGD by turns with the main one: with other numbers, sums have another order."""

    def found(threads: int) -> list[int]:
        return lockstep.launch(
            bodies.threads_of_a_new_thread, processes=2, runtime="cpu", out=tmp_path, launch={"threads": threads}
        )

    assert [found(threads) for threads in (1, 2, 1)] == [[1, 1], [2, 2], [1, 1]]
    fork_server.stop()  # as a check of names does at its end
    other = multiprocessing.get_context("forkserver").Process(target=int)
    other.start()
    other.join(60)
    assert found(1) == [1, 1]
