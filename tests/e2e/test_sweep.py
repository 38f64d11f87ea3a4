"""Sweeps on this machine: `--set a=1,2` and `--sweep FILE`."""

from __future__ import annotations

import json
import signal

import pytest
import yaml

from conftest import TASK_FILE, Project, steps_saved, summary, wait_until

TINY = f"{TASK_FILE}:Tiny"


def test_a_sweep_goes_on_past_a_failure_and_is_continued_by_the_same_command(project: Project) -> None:
    file = project.folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"space": {"optimizer.lr": [0.1, -1.0]}}))
    config = project.config(processes=1, train={"epochs": 30, "batch_size": 12}, task={"type": TINY, "sleep": 0.02},
                            checkpoint={"every": "1 epoch"})  # fmt: skip
    command = ("train", config, "--sweep", file, "--at-once", "1")
    started = project.start(*command)
    folder = wait_until(lambda: list((project.folder / "runs").glob("tiny-sweep-*")), what="the sweep")[0]
    wait_until(lambda: steps_saved(folder / "trial-00000"), what="a checkpoint")
    started.process.send_signal(signal.SIGINT)
    stopped = started.wait()
    assert stopped.code == 75 and "the same command continues" in stopped.err, stopped.text
    assert summary(folder / "trial-00000")["status"] == "preempted"
    assert json.loads((folder / "sweep.json").read_text())[1]["status"] == "queued"
    saved = max(steps_saved(folder / "trial-00000"))
    finished = project.run(*command[:-1], "2")
    assert finished.code == 0, finished.text
    assert list((project.folder / "runs").iterdir()) == [folder], "the same sweep"
    assert f"restored step-{saved:08d}" in (folder / "trial-00000" / "output.log").read_text()
    trials = json.loads((folder / "sweep.json").read_text())
    assert [each["values"] for each in trials] == [{"optimizer.lr": 0.1}, {"optimizer.lr": -1.0}]
    assert [each["status"] for each in trials] == ["completed", "failed"]
    assert "trial 1: failed: " in finished.err and "Invalid learning rate: -1.0" in finished.err
    table = finished.err.split("lockstep: trial  optimizer.lr  epoch  val/loss  status\n")[1].splitlines()
    assert table[0].split()[1:4] == ["0", "0.1", "30"] and "failed" in table[1]
    assert (folder / "best.yaml").is_file() and (folder / "report.html").is_file()
    shown = project.run("report", folder, "-o", "both.html")
    assert shown.code == 0 and "2 runs" in shown.err, shown.text


@pytest.mark.long
def test_trials_are_the_runs_that_single_commands_train(project: Project) -> None:
    config = project.config()
    single = project.train("--set", "optimizer.lr=0.03", "--set", "launch.threads=1", out="single")
    finished = project.run("train", config, "--set", "optimizer.lr=0.3,0.03", "--set", "launch.threads=1")
    assert finished.code == 0, finished.text
    (folder,) = (project.folder / "runs").iterdir()
    assert summary(folder / "trial-00001")["metrics"] == summary(single)["metrics"]
    # A metric that is not there ends the sweep after its first trial.
    (project.folder / "sweep.yaml").write_text(yaml.safe_dump({"metric": "val/acc", "space": {"seed": [1, 2]}}))
    wrong = project.run(
        "train", config, "--sweep", "sweep.yaml", "--at-once", "1", "--out", "wrong", "--set", "processes=1"
    )
    assert wrong.code == 2 and "trial 1" not in wrong.err, wrong.text
    assert (
        "metric: 'val/acc' is not among what the trials measure: train/epoch_loss, val/loss, val/accuracy" in wrong.err
    )
