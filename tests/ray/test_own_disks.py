"""Nodes that do not see the driver's disk: each in a mount namespace of its own, with an empty disk for the runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import losses, steps_saved, summary, wait_until
from lockstep.runs.reader import read_run
from ray_cluster import Nodes
from ray_launching import LIMIT, OnRay, assert_same_weights

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")


def _namespaces_can_be_made() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=10)
    return tried.returncode == 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _apart() -> int:
    return sum("apart" in each["Resources"] for each in ray.nodes() if each["Alive"])


@pytest.fixture
def apart(nodes: Nodes, on_ray: OnRay) -> Iterator[str]:
    """Two nodes with disks of their own at the place of the runs' folder; the address of their cluster."""
    if not _namespaces_can_be_made():
        pytest.skip("mounting a disk for a node needs root and unshare")
    runs = on_ray.folder / "runs"
    runs.mkdir()
    command = f"{sys.executable} -m ray.scripts.scripts"
    scripts, started = [], []
    for number in range(2):
        options = f"--num-cpus=1 --dashboard-agent-listen-port={_free_port()} --resources='{{\"apart\": 1}}' --block"
        join = f"{command} start --address={nodes.cluster.address} {options}"
        script = f"mount -t tmpfs none {runs} && exec {join} >{on_ray.folder}/node-{number}.log 2>&1"
        scripts.append(script)
    try:
        for number, script in enumerate(scripts, start=1):
            started.append(subprocess.Popen(["unshare", "-m", "sh", "-c", script]))
            # One after the other: two that start at the same moment may choose the same socket.
            wait_until(lambda number=number: _apart() == number, 120, f"node {number}")  # type: ignore[misc]
        yield str(nodes.cluster.address)
    finally:
        for process in started:
            everything = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in everything:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(30)
            psutil.wait_procs(everything, timeout=30)


@pytest.mark.long
def test_the_folder_of_a_run_is_fetched_back_from_nodes_with_disks_of_their_own(
    apart: str, on_ray: OnRay, undisturbed: Path
) -> None:
    task = {"type": "recorder.py:Recorder", "orders": str(on_ray.orders), "sleep": 0.1}
    resources = {"CPU": 0, "apart": 1}
    settings = {
        "address": apart,
        "insecure": True,
        "placement": "STRICT_SPREAD",
        "resources": resources,
        "placement_timeout": "90 s",
    }
    started = on_ray.start(on_ray.config(task=task, ray=settings, launch={"max_restarts": 1}))
    run = on_ray.run_folder()  # its topology.json has come back
    wait_until(lambda: steps_saved(run), 90, "the first checkpoint to come back")
    on_ray.order("kill", 1)
    finished = started.wait(LIMIT)
    assert finished.code == 0, finished.text
    assert "restored step-" in finished.out, "brought to nodes whose disks may be empty"
    assert_same_weights(run, undisturbed)
    assert losses(run) == losses(undisturbed) and steps_saved(run) == steps_saved(undisturbed)
    assert summary(run)["status"] == "completed"
    for rank in (0, 1):
        assert "pid" in (run / "logs" / f"rank-{rank}.log").read_text()
    assert not list((run / "checkpoints").glob(".partial-*"))
    looked_at = read_run(run)
    assert [each.kind for each in looked_at.timeline].count("roll call") == 2 and looked_at.failures[0].restarted
    assert looked_at.live is not None and looked_at.lags and (run / "report.html").is_file()


@pytest.mark.long
def test_what_the_mailbox_keeps_is_inside_of_the_runs_folder(tmp_path: Path) -> None:
    from lockstep.ray.mailbox import FolderStore

    (tmp_path / "secret").write_text("hidden")
    (tmp_path / "run").mkdir()
    folder_store = FolderStore(str(tmp_path / "run"))
    for path in ("../secret", "/etc/hostname", "logs/../../secret", "."):
        with pytest.raises(ValueError, match="is not below the run's folder"):
            folder_store.read(path, 0, 10)
    folder_store.write("checkpoints/.partial-x/file", 0, b"one ")
    folder_store.write("checkpoints/.partial-x/file", 4, b"two")
    folder_store.rename("checkpoints/.partial-x", "checkpoints/step-00000001")
    assert folder_store.files("checkpoints") == [("checkpoints/step-00000001/file", 7)]
    assert folder_store.read("checkpoints/step-00000001/file", 2, 4) == b"e tw"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert folder_store.files("checkpoints") == [] and folder_store.checkpoint() is None
