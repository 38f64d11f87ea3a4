"""`lockstep train --profile` and `lockstep profile`, as a user runs them."""

from __future__ import annotations

import socket

import pytest

from conftest import Project, wait_until
from traces import named, torch_traces


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
    assert f"its profile:    {run.relative_to(project.folder) / 'profile'}" in finished.text
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
    for rank in (0, 1):
        log = run / "logs" / f"rank-{rank}.log"
        wait_until(lambda log=log: log.exists() and "profiles on demand" in log.read_text(), what=log.name)
    other = Project(project.folder / "other")
    other.folder.mkdir()
    captured = other.run("profile", *addresses, "--seconds", "0.1")
    started.process.terminate()
    assert started.wait().code == 75
    assert captured.code == 0, captured.text
    assert [len(torch_traces(run, rank)) for rank in (0, 1)] == [1, 1]
    refused = other.run("profile", addresses[0])
    assert refused.code == 2 and f"{addresses[0]}: no profile was taken: failed to connect" in refused.err


def test_what_is_refused_before_anything_starts(project: Project) -> None:
    config = project.config(profile={"ranks": [0, 5]})
    finished = project.run("train", config)
    assert finished.code == 2
    assert "profile.ranks: there is no rank 5; of 2 processes the last is rank 1" in finished.err
    assert not (project.folder / "runs").exists()
