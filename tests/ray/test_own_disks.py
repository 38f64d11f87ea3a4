"""Nodes that do not see the driver's disk: each in a mount namespace of its own, with an empty disk for the runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def apart(nodes: Nodes, on_ray: OnRay) -> Iterator[dict[str, Any]]:
    """Two nodes with disks of their own at `own`, where caches are as well; the settings to have a worker on each."""
    if not _namespaces_can_be_made():
        pytest.skip("mounting a disk for a node needs root and unshare")
    own = on_ray.folder / "own"
    own.mkdir()
    command = f"{sys.executable} -m ray.scripts.scripts"
    started = []
    try:
        for number in (1, 2):
            options = (
                f"--num-cpus=1 --dashboard-agent-listen-port={_free_port()} --resources='{{\"apart\": 1}}' --block"
            )
            join = f"{command} start --address={nodes.cluster.address} {options}"
            script = f"mount -t tmpfs none {own} && exec {join} >{on_ray.folder}/node-{number}.log 2>&1"
            environment = {**os.environ, **cache(on_ray)}
            started.append(subprocess.Popen(["unshare", "-m", "sh", "-c", script], env=environment))
            # One after the other: two that start at the same moment may choose the same socket.
            wait_until(lambda number=number: _apart() == number, 120, f"node {number}")  # type: ignore[misc]
        yield {
            "address": str(nodes.cluster.address),
            "insecure": True,
            "placement": "STRICT_SPREAD",
            "resources": {"CPU": 0, "apart": 1},
            "placement_timeout": "90 s",
        }
    finally:
        for process in started:
            everything = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in everything:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(30)
            psutil.wait_procs(everything, timeout=30)


def cache(on_ray: OnRay) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(on_ray.folder / "own" / "cache")}


@pytest.mark.long
def test_nodes_with_disks_of_their_own_need_a_bucket(apart: dict[str, Any], on_ray: OnRay, undisturbed: Path) -> None:
    runs = on_ray.folder / "own" / "runs"
    refused = on_ray.project.run("train", on_ray.config(ray=apart, launch={"max_restarts": 3}), "--out", runs)
    assert refused.code == 2, refused.text
    assert "rank 0 on " in refused.err and "rank 1 on " in refused.err, "which nodes"
    assert f"the run's folder {runs}/recorded-" in refused.err and "is not seen there within" in refused.err
    assert "a folder that all nodes share, or a bucket" in refused.err and "launch.ray.storage" in refused.err
    assert "restarting" not in refused.err and not (on_ray.orders / "seen").exists(), "nothing was trained"

    task = {"type": "recorder.py:Recorder", "orders": str(on_ray.orders), "sleep": 0.1}
    bucket = on_ray.folder / "bucket"
    config = on_ray.config(task=task, ray={**apart, "storage": f"file://{bucket}"}, launch={"max_restarts": 1})
    started = on_ray.project.start("train", config, env=cache(on_ray))
    wait_until(lambda: list(bucket.glob("*/checkpoints/step-*/manifest.json")), 120, "the first checkpoint")
    (run,) = bucket.iterdir()
    on_ray.order("kill", 1)
    wait_until(lambda: _attempts(run) == 2, 120, "the second attempt")
    wait_until(lambda: len(_complete(run)) > 1, 120, "another checkpoint")
    started.process.send_signal(signal.SIGTERM)
    stopped = started.wait(LIMIT)
    assert stopped.code == 75, stopped.text
    assert "restarting from the newest checkpoint" in stopped.err and "restored step-" in stopped.out
    assert f"saved and stopped; go on with: lockstep resume file://{run}" in stopped.err
    assert summary(run)["status"] == "preempted"

    resumed = on_ray.project.run("resume", f"file://{run}", env=cache(on_ray), limit=LIMIT)
    assert resumed.code == 0, resumed.text
    assert "restored step-" in resumed.out and f"run folder: file://{run}" in resumed.err
    assert_same_weights(run, undisturbed)
    assert losses(run) == losses(undisturbed) and summary(run)["status"] == "completed"
    assert (run / "report.html").is_file()


def _complete(run: Path) -> list[int]:
    return [step for step in steps_saved(run) if (run / "checkpoints" / f"step-{step:08}" / "manifest.json").exists()]


def _attempts(run: Path) -> int:
    return [each.kind for each in read_run(run).timeline].count("roll call")
