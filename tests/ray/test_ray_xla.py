"""XLA workers on real Ray, with PJRT on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import losses, summary
from ray_cluster import Fit, Nodes, notes, shown

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")
pytest.importorskip("torch_xla", reason="torch_xla is not installed; it has no build for 64-bit ARM")

import ray_bodies as bodies

from lockstep.config.schema import RayCluster
from lockstep.ray.__main__ import verify


@pytest.mark.requirement("R06")
@pytest.mark.requirement("R07")
@pytest.mark.requirement("R10")
def test_the_call_of_the_seed_trains_on_xla_workers(
    fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the losses of the same training function on gloo."""
    found = {}
    for backend, more in (("gloo", {}), ("xla_tpu", {"xla_spmd_config": {"data_parallel_size": 2}})):
        (tmp_path / f"notes-{backend}").mkdir()
        fit(
            bodies.own_loop,
            backend=backend,
            loop_config={"notes": str(tmp_path / f"notes-{backend}"), "epochs": 1, "dropout": 0.0},
            settings={"log": {"every": "1 step"}},
            folder=str(tmp_path / backend),
            name=backend,
            **more,
        )
        found[backend] = losses(tmp_path / backend)
    assert summary(tmp_path / "xla_tpu")["runtime"] == "xla"
    assert found["xla_tpu"] == pytest.approx(found["gloo"], rel=1e-5) and len(found["gloo"]) > 3
    printed = shown(capfd, "Worker 1: XLA device initialized")
    for rank in (0, 1):
        # Each sees a single device, calls it xla:0, and says which one that is.
        assert f"Worker {rank}: XLA device initialized: xla:0 for worker rank {rank} (physical device " in printed
        assert f"Worker {rank}: no XLA collectives across the 2 workers here" in printed
        assert re.search(rf"Worker {rank}: join\w+ by xla://", printed)
        assert re.search(rf"Worker {rank}: join\w+ by env://", printed)
    assert "all 2 workers are here" in printed


@pytest.mark.requirement("R05")
@pytest.mark.requirement("R09")
@pytest.mark.requirement("R11")
def test_workers_that_see_several_devices_use_that_of_their_rank(fit: Fit, tmp_path: Path) -> None:
    fit(
        bodies.look_at_xla,
        backend="xla",
        xla_spmd_config={"data_parallel_size": 2},
        xla_memory_fraction=0.5,
        loop_config={"notes": str(tmp_path)},
        run_config={"worker_runtime_env": {"env_vars": {"CPU_NUM_DEVICES": "2"}}},
    )
    for rank in (0, 1):
        (seen,) = notes(tmp_path)[rank]
        assert seen["device"] == f"xla:{rank}" and seen["strategy"] == "ddp"
        assert (seen["mesh"], seen["axes"]) == ([2, 1], ["data", "model"])  # of the two workers
        assert seen["allocator"] == "0.5"


@pytest.mark.requirement("R11")
@pytest.mark.requirement("R13")
def test_one_worker_has_a_mesh_of_its_devices(fit: Fit, tmp_path: Path) -> None:
    fit(bodies.look_at_xla, 1, "xla", xla_spmd_config={"mesh_shape": [2, 2]}, loop_config={"notes": str(tmp_path)})
    (seen,) = notes(tmp_path)[0]
    assert seen["strategy"] == "spmd" and seen["devices"] == [4, 4]
    assert (seen["mesh"], seen["axes"]) == ([2, 2], ["data", "model"])


@pytest.mark.requirement("R14")
def test_the_verification_has_a_line_for_every_xla_worker(nodes: Nodes) -> None:
    lines = verify(2, "xla_tpu", RayCluster(placement_timeout=120), {"CPU": 1.0}, 60)
    for rank, line in enumerate(lines[:2]):
        assert re.fullmatch(
            rf"worker rank {rank}: node \S+, device xla:0, physical device \S+/pjrt-cpu/pid-\d+\S*, ok", line
        )
    assert lines[2].startswith("verdict: OK, 2 workers on 2 devices, none shared")
