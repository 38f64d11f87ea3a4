"""Profiles of a real run in a world of one: which steps and regions are in them, and that they never end a run."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.load import validate
from lockstep.config.schema import Profile, RunSettings
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Place, Topology
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError
from lockstep.profiler import Profiler
from lockstep.profiler.demand import Demand, _seconds, capture
from lockstep.profiler.window import TorchBackend, Window
from lockstep.record.display import Display
from lockstep.runtime.cpu import CpuRuntime
from traces import REGIONS, named, slices, torch_traces

DATA = TensorDataset(torch.randn(20, 3))
Training = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Training]:
    """Trains for so many epochs of 5 steps, validating and saving after each; in one folder, as if resumed."""
    made: list[Run] = []

    def training(
        profile: dict[str, Any] | None,
        epochs: int = 2,
        topology: Topology | None = None,
        meanwhile: Callable[[Run], None] = lambda run: None,
        accumulate: int = 1,
    ) -> Run:
        given = None if profile is None else {"port": None, **profile}
        settings = RunSettings.model_validate({"checkpoint": {"async": False}, "profile": given})
        group = Group(0, 1, 10.0)
        parts = topology or Topology(), CpuRuntime(), group, settings, tmp_path, Display(), StopRequests()
        run = Run(Engine(*parts))
        made.append(run)
        model = nn.Linear(3, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        for _ in run.epochs(epochs):
            for (batch,) in run.batches(DATA, 4, accumulate=accumulate):
                loss = model(batch).square().mean()
                meanwhile(run)
                run.backward(loss)
                run.step(optimizer)
            run.evaluate(lambda batch: {"error": run.module(batch[0])[:, 0].abs()}, DATA, 4)
            run.checkpoint()
        run._engine.finish()
        return run

    yield training
    for run in made:
        run._engine.give_up()


@pytest.mark.requirement("P10")
def test_the_steps_of_the_window_and_every_region_are_in_the_trace(train: Training, tmp_path: Path) -> None:
    train({"start_step": 4, "steps": 3})
    (trace,) = torch_traces(tmp_path)
    found = named(trace)
    assert [name for name in found if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (4, 5, 6)]
    # Step 5 ends an epoch, so that it has validation and a checkpoint too.
    expected = dict.fromkeys(("data", "forward", "backward", "optimizer"), 3) | {"checkpoint": 1, "validate": 1}
    assert {name: found[name] for name in REGIONS} == expected | {"data": 4}  # and one more look, which ends the epoch


def test_regions_follow_each_other_within_their_step(train: Training, tmp_path: Path) -> None:
    train({"start_step": 2, "steps": 1})
    (trace,) = torch_traces(tmp_path)
    times = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in slices(trace)}
    order = ["data", "forward", "backward", "optimizer"]
    assert all(times[one][1] <= times[two][0] for one, two in itertools.pairwise(order))
    begin, end = times["ProfilerStep#2"]
    assert begin <= times["data"][0] and times["optimizer"][1] <= end


def test_a_region_of_ones_own(train: Training, tmp_path: Path) -> None:
    def meanwhile(run: Run) -> None:
        with run.region("mine"):
            torch.ones(3).sum()

    train({"start_step": 4, "steps": 2}, meanwhile=meanwhile)
    found = named(torch_traces(tmp_path)[0])
    assert found["mine"] == found["forward"] == 2


def test_a_batch_in_parts_is_one_step(train: Training, tmp_path: Path) -> None:
    train({"start_step": 2, "steps": 2}, accumulate=2)
    found = named(torch_traces(tmp_path)[0])
    assert (found["forward"], found["backward"], found["optimizer"]) == (4, 4, 2)
    assert found["ProfilerStep#2"] == found["ProfilerStep#3"] == 1


def test_by_default_the_tenth_step_of_the_process_is_the_first(train: Training, tmp_path: Path) -> None:
    train({}, epochs=3)
    train({}, epochs=6)  # goes on from step 15
    first, second = (named(each) for each in torch_traces(tmp_path))
    steps = [[name for name in each if name.startswith("ProfilerStep")] for each in (first, second)]
    assert steps == [[f"ProfilerStep#{n}" for n in range(start, start + 5)] for start in (10, 25)]


def test_a_run_that_ends_within_the_window_writes_what_there_is(train: Training, tmp_path: Path) -> None:
    train({"start_step": 9, "steps": 100})
    found = named(torch_traces(tmp_path)[0])
    assert found["ProfilerStep#10"] == 1 and found["forward"] == 2


@pytest.mark.parametrize(
    ("profile", "epochs", "why"),
    [
        ({"start_step": 11}, 2, "it was to begin at step 11, and the run ended before that; lower profile.start_step"),
        ({}, 1, "it was to begin at step 10, and the run ended before that; lower profile.start_step"),
        ({"start_step": 3, "steps": 2}, 0, "no step was taken by run.batches"),
    ],
)
def test_a_window_after_the_last_step_is_reported(
    train: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture, profile: dict[str, Any], epochs: int, why: str
) -> None:
    train(profile, epochs=epochs)
    assert f"profile: nothing was captured: {why}" in caplog.text
    assert torch_traces(tmp_path) == []


def test_a_window_that_was_over_before_a_resume_is_reported(
    train: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(None)
    train({"start_step": 2, "steps": 3}, epochs=3)
    assert "steps 2 to 4 were over when this process began, at step 11" in caplog.text


def test_the_ranks_that_are_asked_for(train: Training, tmp_path: Path) -> None:
    second = Topology(Place(rank=1, local_rank=1), world_size=2, local_world_size=2, port=1)
    train({"start_step": 1, "ranks": [0]}, topology=second)
    assert not (tmp_path / "profile").exists()
    with pytest.raises(ConfigError, match=r"profile\.ranks: there is no rank 2; of 2 processes the last is rank 1"):
        train({"ranks": [0, 2]}, topology=second)


@pytest.mark.parametrize("profile", [None, {"enabled": False, "start_step": 1}])
def test_off_is_nothing_at_all(train: Training, tmp_path: Path, profile: dict[str, Any] | None) -> None:
    assert type(train(profile)._engine.profiler) is Profiler
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(
    train: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").touch()
    assert train({"start_step": 2}).progress.step == 10
    assert "a trace from step 2 on could not be started" in caplog.text and "Training continues" in caplog.text


def test_a_profile_whose_folder_goes_away_ends_no_run(
    train: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meanwhile(run: Run) -> None:
        folder = tmp_path / "profile" / "proc_0"
        if run.progress.step == 3 and folder.is_dir():
            folder.rmdir()
            folder.touch()

    assert train({"start_step": 2, "steps": 3}, meanwhile=meanwhile).progress.step == 10
    assert "could not be written" in caplog.text


def test_another_profiler_at_work_ends_no_run(train: Training) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert train({"start_step": 2}).progress.step == 10


def test_a_run_that_is_asked_to_stop_writes_its_trace(train: Training, tmp_path: Path) -> None:
    def meanwhile(run: Run) -> None:
        if run.progress.step == 3:
            run._engine.requests.leave = "asked by the test"

    with pytest.raises(Preempted):
        train({"start_step": 2, "steps": 1000}, epochs=100, meanwhile=meanwhile)
    assert named(torch_traces(tmp_path)[0])["ProfilerStep#2"] == 1


def test_a_run_that_fails_leaves_the_profiler_to_the_next(train: Training, tmp_path: Path) -> None:
    def meanwhile(run: Run) -> None:
        if run.progress.step == 3:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        train({"start_step": 2}, meanwhile=meanwhile)
    assert torch_traces(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_kernels_of_a_gpu_are_in_the_trace(tmp_path: Path) -> None:
    device, model = torch.device("cuda"), nn.Linear(256, 256).cuda()
    settings = Profile(start_step=2, steps=2)
    profiler = Window(TorchBackend("cuda"), settings, tmp_path / "profile" / "proc_0", Activity(), Demand())
    for step in range(1, 5):
        profiler.next_step(step)
        profiler.enter("forward")
        model(torch.ones(64, 256, device=device)).sum().backward()
        profiler.enter(None)
    profiler.close()
    (trace,) = torch_traces(tmp_path)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


# On demand


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.requirement("P10")
def test_a_trace_on_demand(train: Training, tmp_path: Path, port: int) -> None:
    """Asked by a client while the run trains, as TensorBoard would; the training thread takes it."""
    pytest.importorskip("grpc", reason="profiles on demand need grpcio")
    answers: list[dict[str, str]] = []
    client = threading.Thread(target=lambda: answers.append(capture([f"127.0.0.1:{port}"], 0.05)))

    def meanwhile(run: Run) -> None:
        if run.progress.step == 0:
            client.start()
        if answers:
            run.stop("there is a trace")

    train({"steps": 0, "port": port}, epochs=100_000, meanwhile=meanwhile)
    client.join(10)
    assert answers == [{}]
    (trace,) = torch_traces(tmp_path)
    assert named(trace)["forward"] >= 1
    assert "failed to connect" in capture([f"127.0.0.1:{port}"], 0.05)[f"127.0.0.1:{port}"]


def test_who_asks_a_run_that_is_over_is_told(train: Training, tmp_path: Path, port: int) -> None:
    pytest.importorskip("grpc", reason="profiles on demand need grpcio")
    answers: list[dict[str, str]] = []
    client = threading.Thread(target=lambda: answers.append(capture([f"127.0.0.1:{port}"], 30)))

    def meanwhile(run: Run) -> None:
        if run.progress.step == 0:
            client.start()

    train({"steps": 0, "port": port}, epochs=20, meanwhile=meanwhile)
    client.join(10)
    assert len(answers) == 1  # at once, with a trace of what there was or with the reason


def test_the_server_listens_at_loopback_alone(train: Training, port: int) -> None:
    pytest.importorskip("grpc", reason="profiles on demand need grpcio")
    psutil = pytest.importorskip("psutil")
    found: list[str] = []

    def meanwhile(run: Run) -> None:
        listening = [each for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
        found.extend(each.laddr.ip for each in listening if each.laddr.port == port)

    train({"port": port, "steps": 0}, epochs=1, meanwhile=meanwhile)
    assert {address.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}


@pytest.mark.parametrize("reuse", [False, True], ids=["taken", "taken by a server that shares its port"])
def test_a_port_in_use_is_told_and_ends_no_run(train: Training, caplog: pytest.LogCaptureFixture, reuse: bool) -> None:
    pytest.importorskip("grpc", reason="profiles on demand need grpcio")
    with socket.socket() as taken:
        if reuse:  # as gRPC does by itself: a second server would get some of the requests
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert train({"port": number, "start_step": 2}).progress.step == 10
    assert f"profile: 127.0.0.1:{number} is in use" in caplog.text and "Set profile.port" in caplog.text


@pytest.mark.parametrize(
    ("message", "seconds"),
    [(b"", 1.0), (b"\x08\xf4\x03", 0.5), (b"\x08\xe8\x07\x22\x02\x10\x02", 1.0), (b"\x12\x01x", 1.0), (b"\x08", 1.0)],
)
def test_how_long_a_request_asks_for(message: bytes, seconds: float) -> None:
    assert _seconds(message) == seconds


# The settings


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"steps": 1001}, "profile.steps: input should be less than or equal to 1000, got 1001"),
        ({"start_step": 0}, "profile.start_step: input should be greater than 0, got 0"),
        ({"port": 70000}, "profile.port: input should be less than 65536, got 70000"),
        ({"ranks": [-1]}, "profile.ranks[0]: input should be greater than or equal to 0, got -1"),
        ({"rank": [0]}, "profile.rank: unknown key, did you mean ranks?"),
    ],
)
def test_bad_settings(profile: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(RunSettings, {"profile": profile}, {}, "here")
    assert message in str(refused.value)


def test_asking_for_a_trace_does_not_load_torch() -> None:
    code = "import sys, lockstep.profiler.demand; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.fixture(autouse=True)
def everything_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
