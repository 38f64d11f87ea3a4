"""`python -m lockstep.ray`: a line per worker and a verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ray_cluster import SETTINGS, Nodes

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

from lockstep.config.schema import RayCluster
from lockstep.errors import RollCallError
from lockstep.ray.__main__ import verify


def _command(*arguments: str, limit: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep.ray", *arguments],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=limit,
    )


@pytest.mark.long
@pytest.mark.requirement("R14")
def test_a_line_for_every_worker_and_a_verdict(nodes: Nodes) -> None:
    finished = _command(
        "--workers", "2", "--backend", "gloo", "--insecure", "--address", nodes.cluster.address, "--timeout", "60"
    )
    assert finished.returncode == 0, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if line.startswith("worker rank")]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"worker rank {rank}: node \S+, device cpu, physical device \S+/cpu/pid-\d+\S*, ok", line)
    assert "verdict: OK, 2 workers on 2 devices, none shared" in finished.stdout


@pytest.mark.long
@pytest.mark.requirement("R04")
@pytest.mark.requirement("R06")
def test_workers_that_share_a_device_or_believe_to_be_alone_are_found_out(nodes: Nodes) -> None:
    with pytest.raises(RollCallError) as failed:
        verify(2, "gloo", RayCluster(placement_timeout=120), {"CPU": 1.0}, 60, task="sabotage_devices:Task")
    assert failed.value.exit_code == 3
    assert "ranks 0, 1 are on the same physical device, device-7" in str(failed.value)
    assert "the device runtime believes in a world of 1, the run has 2 ranks" in str(failed.value)
