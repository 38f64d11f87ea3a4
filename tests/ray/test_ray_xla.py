"""XLA workers on real Ray, with PJRT on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import summary
from ray_cluster import Fit, notes, shown

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")
pytest.importorskip("torch_xla", reason="torch_xla is not installed; it has no build for 64-bit ARM")

import ray_bodies as bodies


def test_the_call_of_the_seed_trains_on_xla_workers(
    fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(
        bodies.own_loop,
        backend="xla_tpu",
        xla_spmd_config={"data_parallel_size": 2},
        loop_config={"notes": str(tmp_path), "epochs": 1},
        folder=str(tmp_path / "on-xla"),
    )
    assert summary(tmp_path / "on-xla")["runtime"] == "xla"
    assert [each["world"] for each in notes(tmp_path)[0] if "start" in each] == [2]
    printed = shown(capfd, "Worker 1: XLA device initialized")
    for rank in (0, 1):
        assert f"Worker {rank}: XLA device initialized: xla:0 for worker rank {rank} (physical device " in printed
        assert f"Worker {rank}: no XLA collectives across the 2 workers here" in printed
    for way in ("xla://", "env://"):
        assert way in printed
