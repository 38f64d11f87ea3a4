"""`lockstep train --profile`, `lockstep profile capture` and `lockstep profile view`, as a user runs them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest

from conftest import Project, wait_until
from traces import named, torch_traces

PLUGIN = pytest.mark.skipif(importlib.util.find_spec("xprof") is None, reason="the profile extra is not installed")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000", "--dump-dom",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.requirement("P10")
def test_train_with_a_profile(project: Project) -> None:
    started = project.start(
        "train", project.config(train={"epochs": 3, "batch_size": 12}), "--profile",
        "--set", "profile.start_step=6", "--set", f"profile.port={free_port()}",
    )  # fmt: skip
    finished = started.wait()
    assert finished.code == 0, finished.text
    run = project.only_run()
    assert "profile of steps 6 to 10 in" in finished.text
    assert f"lockstep profile view {run.relative_to(project.folder)}" in finished.text
    for rank in (0, 1):
        (trace,) = torch_traces(run, rank)
        # Step 7 ends the first epoch.
        assert {"data", "forward", "backward", "optimizer", "validate", "checkpoint"} <= {*named(trace)}


def test_a_profile_on_demand_of_both_ranks(project: Project) -> None:
    pytest.importorskip("grpc", reason="profiles on demand need grpcio")
    port = free_port()
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    started = project.start(
        "train", project.config(train={"epochs": 100_000, "batch_size": 12}, profile={"steps": 0, "port": port})
    )
    run = wait_until(lambda: next(iter((project.folder / "runs").glob("*")), None), what="the run's folder")
    log = run / "logs" / "rank-1.log"
    wait_until(lambda: log.exists() and "profiles on demand" in log.read_text(), what="rank 1")
    other = Project(project.folder / "other")
    other.folder.mkdir()
    captured = other.run("profile", "capture", *addresses, "--seconds", "0.1")
    started.process.terminate()
    assert started.wait().code == 75
    assert captured.code == 0, captured.text
    assert [len(torch_traces(run, rank)) for rank in (0, 1)] == [1, 1]
    refused = other.run("profile", "capture", addresses[0])
    assert refused.code == 2 and f"{addresses[0]}: no profile was taken: failed to connect" in refused.err


def test_what_is_refused_before_anything_starts(project: Project) -> None:
    config = project.config(profile={"regions": ["forwrd"], "ranks": [0, 5]})
    finished = project.run("train", config)
    assert finished.code == 2
    assert (
        "profile.regions[0]: must be one of data, forward" in finished.err and "did you mean forward?" in finished.err
    )
    finished = project.run("train", config, "--set", "profile.regions=[data]")
    assert finished.code == 2
    assert "profile.ranks: there is no rank 5; of 2 processes the last is rank 1" in finished.err
    assert not (project.folder / "runs").exists()
    finished = project.run("profile", "view", "nowhere")
    assert finished.code == 2 and "nowhere: there is no such folder" in finished.err


@PLUGIN
@pytest.mark.requirement("P10")
def test_tensorboard_shows_a_trace_in_a_browser(project: Project) -> None:
    trace = project.folder / "run" / "profile" / "proc_0" / "proc_0.1700000000000000000.pt.trace.json.gz"
    trace.parent.mkdir(parents=True)
    names = [{"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "the training thread"}}]
    slices = [{"ph": "X", "name": "forward", "pid": 7, "tid": 7, "ts": 1.0, "dur": 5.0}]
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": names + slices}).encode()))

    port = free_port()
    viewer = project.start("profile", "view", "run", "--port", str(port))
    try:
        plugin = f"http://127.0.0.1:{port}/data/plugin/profile"
        (session,) = wait_until(lambda: fetched(f"{plugin}/runs"), what="TensorBoard")
        assert session.startswith("profile/proc_0/")
        data = f"/data/plugin/profile/data?run={session}&tag=trace_viewer@&host=proc_0"
        shown = fetched(f"http://127.0.0.1:{port}{data}")
        assert "forward" in {event.get("name") for event in shown["traceEvents"]}
        if BROWSER is None:
            pytest.skip("there is no chromium to open the page in")
        query = urllib.parse.urlencode({"is_streaming": "true", "is_oss": "true", "trace_data_url": data})
        page = [f"--user-data-dir={project.folder / 'browser'}", f"{plugin}/trace_viewer_index.html?{query}"]
        opened = subprocess.run([BROWSER, *BROWSER_FLAGS, *page], capture_output=True, text=True, timeout=120)
        assert "the training thread" in opened.stdout, opened.stderr
    finally:
        viewer.end()


def fetched(url: str) -> object:
    """What a JSON address answers; None while nobody does."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            body = response.read()
            gzipped = response.headers.get("Content-Encoding") == "gzip"
    except (urllib.error.URLError, ConnectionError):
        return None
    return json.loads(gzip.decompress(body) if gzipped else body)
