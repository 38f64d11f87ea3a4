"""`--out s3://...`: runs whose folder is in a bucket of a real S3 server, from training to resuming from it alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import TASK_FILE, losses, steps_saved, summary, wait_until
from lockstep.doctor.ask import Question
from s3_server import KEY, SECRET, Stored

TINY = f"{TASK_FILE}:Tiny"
EPOCHS = {"epochs": 4, "batch_size": 12}
OFTEN = {"every": "4 steps"}


def whole_steps(run: Path) -> list[int]:
    """Steps with a checkpoint that counts."""
    return [step for step in steps_saved(run) if (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()]


def assert_same_end(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    ours, theirs = (load_file(max((each / "checkpoints").glob("step-*")) / "model.safetensors")
                    for each in (run, reference))  # fmt: skip
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("status", "epoch", "step", "metrics", "best"):
        assert summary(run)[name] == summary(reference)[name]


def test_stopped_and_resumed_from_the_bucket_alone(stored: Stored) -> None:
    config = stored.project.config(train=EPOCHS, checkpoint=OFTEN, task={"type": TINY, "dropout": 0.2})
    reference = stored.project.run("train", config, "--out", "local")
    assert reference.code == 0, reference.text
    slow = stored.project.config(train=EPOCHS, checkpoint=OFTEN, task={"type": TINY, "dropout": 0.2, "sleep": 0.1})
    started = stored.start("train", slow, "--out", stored.out)
    run = stored.in_bucket()
    wait_until(lambda: whole_steps(run), what="a checkpoint in the bucket")
    started.process.send_signal(signal.SIGTERM)
    stopped = started.wait()
    assert stopped.code == 75, stopped.text
    assert f"saved and stopped; go on with: lockstep resume {stored.url()}" in stopped.err
    newest = max(steps_saved(stored.here()))
    assert whole_steps(run) == steps_saved(stored.here()), "retention there follows that here"
    assert summary(run)["status"] == "preempted"
    assert stat.S_IMODE((stored.cache / "lockstep" / "runs").stat().st_mode) == 0o700
    assert SECRET not in stopped.text and not [each for each in run.rglob("*") if SECRET.encode() in _bytes(each)]

    shutil.rmtree(stored.cache)
    resumed = stored.run("resume", stored.url())
    assert resumed.code == 0, resumed.text
    assert f"restored step-{newest:08d}" in resumed.out
    assert_same_end(run, stored.project.only_run("local"))
    assert whole_steps(run) == steps_saved(stored.project.only_run("local"))
    assert {"config.yaml", "metrics.jsonl", "summary.json", "topology.json"} <= {each.name for each in run.iterdir()}
    log = (run / "logs" / "rank-0.log").read_text()
    assert "saved at step" in log and f"restored step-{newest:08d}" in log, "the log of both starts"
    assert not [each for each in run.rglob("*") if ".partial" in each.name or each.name.startswith(".lock")]


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@pytest.mark.long
def test_a_server_that_is_down_for_a_while_costs_nothing(stored: Stored) -> None:
    config = stored.project.config(train={"epochs": 6, "batch_size": 12}, checkpoint=OFTEN,
                                   task={"type": TINY, "sleep": 0.15})  # fmt: skip
    started = stored.start("train", config, "--out", stored.out)
    run = stored.in_bucket()
    wait_until(lambda: whole_steps(run), what="a checkpoint in the bucket")
    stored.server.stop()
    before = max(whole_steps(run))
    wait_until(lambda: "cannot be written" in (stored.project.folder / ".stderr").read_text(), 30, "a warning")
    wait_until(lambda: max(steps_saved(stored.here())) > before + 4, 30, "training to go on")
    stored.server.start()
    finished = started.wait()
    assert finished.code == 0, finished.text
    assert f"{stored.url()} cannot be written: " in finished.err
    assert "Training continues; what is not there is kept in" in finished.err
    assert f"{stored.url()} can be written again" in finished.err
    assert whole_steps(run) == steps_saved(stored.here()) and summary(run)["status"] == "completed"
    assert losses(run) == losses(stored.here())


@pytest.mark.long
def test_a_bucket_that_stays_behind_is_told_by_the_exit_code_and_caught_up_by_a_resume(stored: Stored) -> None:
    config = stored.project.config(train=EPOCHS, checkpoint=OFTEN, task={"type": TINY, "sleep": 0.1},
                                   timeouts={"stop": "4 s"})  # fmt: skip
    started = stored.start("train", config, "--out", stored.out)
    run = stored.in_bucket()
    wait_until(lambda: whole_steps(run), what="a checkpoint in the bucket")
    stored.server.stop()
    started.process.send_signal(signal.SIGTERM)
    stopped = started.wait()
    assert stopped.code == 6, stopped.text
    here = stored.here()
    assert (
        f"{stored.url()} is behind: step-" in stopped.err and f"Nothing is lost: all of it is in {here}" in stopped.err
    )
    stored.server.start()
    resumed = stored.run("resume", here)
    assert resumed.code == 0, resumed.text
    assert whole_steps(run) == steps_saved(here) and summary(run)["status"] == "completed"


def test_ranks_of_another_launcher_keep_others_out_and_leave_once_all_is_there(stored: Stored, tmp_path: Path) -> None:
    stored.project.config(train={"epochs": 100, "batch_size": 12}, checkpoint={"every": None},
                          task={"type": TINY, "sleep": 0.05})  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, **stored.environment(), "OMP_NUM_THREADS": "1",
              "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    command = [sys.executable, "-m", "lockstep", "train", "config.yaml", "--out", stored.out]
    ranks = [
        subprocess.Popen(command, cwd=stored.project.folder, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        wait_until(lambda: [*stored.cache.glob("lockstep/runs/*/*/metrics.jsonl")], what="the first step")
        second = stored.run("resume", stored.url(), cache=tmp_path / "another-host")
        assert second.code == 2, second.text
        assert "another run is at work in this folder: its writer, process" in second.err
        ranks[1].send_signal(signal.SIGTERM)
        codes = [each.wait(60) for each in ranks]
        assert codes == [75, 75], [each.stderr.read() for each in ranks if each.stderr]
    finally:
        for each in ranks:
            each.kill()
            each.communicate(timeout=10)
    assert whole_steps(stored.in_bucket()) == steps_saved(stored.here()) != []


@pytest.mark.long
def test_from_python_one_process_trains_to_a_bucket(stored: Stored) -> None:
    (stored.project.folder / "program.py").write_text(f"""
import lockstep

if __name__ == "__main__":
    done = lockstep.train(task="{TINY}", processes=1, runtime="cpu", out="{stored.out}", name="one")
    print(done["status"], done["folder"])
""")
    finished = stored.project.start_python("program.py", env=stored.environment()).wait()
    assert finished.code == 0, finished.text
    assert f"completed {stored.here()}" in finished.out
    run = stored.in_bucket()
    assert whole_steps(run) and summary(run)["status"] == "completed"


@pytest.mark.parametrize(
    ("out", "change", "message"),
    [
        (
            "s3://nobody/runs",
            {},
            "cannot be written in s3://nobody: FileNotFoundError: The specified bucket does",
        ),
        (
            "s3://bucket/runs",
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            "cannot be written in s3://bucket: Permission",
        ),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the network and AWS_ENDPOINT_URL"),
        (f"s3://{KEY}:{SECRET}@bucket/runs", {}, "--out s3://***@bucket/runs: credentials do not belong into a URL"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_at_once(
    stored: Stored, out: str, change: dict[str, str], message: str
) -> None:
    began = time.monotonic()
    config = stored.project.config()
    environment = {**stored.environment(), **change}
    refused = stored.project.run("train", config, "--out", out, env=environment)
    assert refused.code == 2, refused.text
    assert message in refused.err and SECRET not in refused.text and "Traceback" not in refused.text
    assert time.monotonic() - began < 20
    assert not stored.cache.exists()


def test_a_url_that_is_no_run(stored: Stored) -> None:
    refused = stored.run("resume", "s3://bucket/runs/nothing")
    assert refused.code == 2 and "is not the folder of a run: there is no config.yaml in it" in refused.err


def test_doctor_says_of_a_bucket_whether_it_can_be_written(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in stored.environment().items():
        monkeypatch.setenv(name, value)
    with Question("bucket", stored.out, limit=60) as question:
        well = question.check("bucket", "")
    assert well.verdict == "ok" and f"{stored.out} can be written, listed, read and deleted from" in well.found
    assert not list((stored.server.disk / "bucket").rglob(".lockstep-probe*"))
    with Question("bucket", "s3://nobody/runs", limit=60) as question:
        ill = question.check("bucket", "")
    assert ill.verdict == "fail" and "Create the bucket s3://nobody" in ill.found
    refused = stored.run("doctor", "--out", "ftp://bucket/runs")
    assert refused.code == 2 and "s3://, gs://, file:// work" in refused.text


@pytest.mark.long
def test_doctor_looks_at_a_bucket_in_the_place_of_a_disk(stored: Stored) -> None:
    ill = stored.run("doctor", "--out", "s3://nobody/runs", "--json")
    assert ill.code == 1, ill.text
    checks = {each["name"]: each for each in json.loads(ill.out)["checks"]}
    assert checks["bucket"]["verdict"] == "fail" and "disk" not in checks
