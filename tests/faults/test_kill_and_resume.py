"""Killed at any moment and resumed, a run ends bit for bit like one that was never interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TASK_FILE, Project, last_weights, losses, rank_pids, rows, steps_saved, summary, wait_until

# Everything that has state: dropout and augmentation (generators), momentum, a scheduler, early stopping, workers,
# averaged weights, which are measured in every validation.
HARD: dict[str, Any] = {
    "train": {"epochs": 3, "batch_size": 12, "ema": {"decay": 0.9, "every": "2 steps"}},
    "scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "step_size": 5, "gamma": 0.5, "every": "1 step"},
    "early_stop": {"patience": 50},
    "checkpoint": {"every": "2 steps"},
    "log": {"every": "3 steps"},
}


FSDP = "fsdp"
HSDP = {"type": "hsdp", "mesh": {"replica": 2, "data": 2}}


def task(sleep: float = 0.0, **rest: Any) -> dict[str, Any]:
    return {"type": f"{TASK_FILE}:Augmented", "dropout": 0.3, "sleep": sleep, **rest}


def assert_same_end(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    validations = [[row for row in rows(each) if "val/loss" in row] for each in (run, reference)]
    assert validations[0] == validations[1]
    assert all(row["val/ema/loss"] != row["val/loss"] for row in validations[0])
    found, expected = last_weights(run), last_weights(reference)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("status", "epoch", "step", "metrics", "best"):
        assert summary(run)[name] == summary(reference)[name]


@pytest.mark.parametrize(
    ("workers", "processes", "strategy"),
    [
        pytest.param(0, 2, "ddp", marks=pytest.mark.long),
        pytest.param(1, 3, "ddp", marks=pytest.mark.long),
        pytest.param(0, 3, "ddp", marks=pytest.mark.long),
        pytest.param(1, 2, "ddp", marks=pytest.mark.long),
        (0, 3, FSDP),
        pytest.param(1, 2, FSDP, marks=pytest.mark.long),
        pytest.param(0, 4, HSDP, marks=pytest.mark.long),
    ],
    ids=lambda each: each["type"] if isinstance(each, dict) else str(each),
)
def test_sigkill_of_a_rank_in_mid_epoch(project: Project, processes: int, workers: int, strategy: Any) -> None:
    data = {"split": {"train": 0.8, "val": 0.2}, "workers": workers}
    how = {"processes": processes, "data": data, "strategy": strategy, **HARD}
    reference = project.train(out="reference", task=task(), **how)
    config = project.config(task=task(sleep=0.1), **how)
    command = project.start("train", config, "--out", "killed")
    run = Path(wait_until(lambda: list(project.folder.glob("killed/*"))[:1], what="the run's folder")[0])
    pids = rank_pids(run)
    wait_until(lambda: len(steps_saved(run)) >= 2, what="two checkpoints")
    os.kill(pids[processes - 1], signal.SIGKILL)
    killed = time.monotonic()
    finished = command.wait()
    assert time.monotonic() - killed < 30
    assert finished.code == 5
    assert f"rank {processes - 1} of {processes}" in finished.err
    assert "SIGKILL" in finished.err
    assert f"lockstep resume {run.relative_to(project.folder)}" in finished.err
    assert summary(run)["status"] == "failed"
    assert max(steps_saved(run)) < 21, "the run was killed before its end"
    resumed = project.run("resume", run)
    assert resumed.code == 0, resumed.text
    assert_same_end(run, reference)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param(FSDP, marks=pytest.mark.long, id="fsdp")])
def test_sigkill_of_everything_at_once(project: Project, strategy: Any) -> None:
    """Like a power cut: launcher and ranks die in the same moment, at a moment that is different every time."""
    reference = project.train(out="reference", task=task(), strategy=strategy, **HARD)
    config = project.config(task=task(sleep=0.05), strategy=strategy, **HARD)
    command = project.start("train", config, "--out", "killed")
    run = Path(wait_until(lambda: list(project.folder.glob("killed/*"))[:1], what="the run's folder")[0])
    wait_until(lambda: steps_saved(run), what="a checkpoint")
    time.sleep(time.time() % 0.3)
    for member in command.members():
        member.kill()
    command.process.wait(10)
    command.end()
    resumed = project.run("resume", run)
    assert resumed.code == 0, resumed.text
    assert_same_end(run, reference)


def test_exact_runs_are_killed_and_go_on_with_other_numbers_of_ranks(project: Project) -> None:
    """Dropout, augmentation, averaged weights and clipping: the end has the bits of one process that nobody killed."""
    how = {**HARD, "train": {**HARD["train"], "batch_size": 16, "exact": True, "clip_norm": 0.5}}
    reference = project.train(out="reference", task=task(), processes=1, **how)
    command = project.start("train", project.config(task=task(sleep=0.1), processes=4, **how), "--out", "killed")
    run = Path(wait_until(lambda: list(project.folder.glob("killed/*"))[:1], what="the run's folder")[0])
    for saved, ranks in ((1, 2), (2, 1)):
        wait_until(lambda least=saved: len(steps_saved(run)) >= least, what="a checkpoint")
        for member in command.members():
            member.kill()
        command.process.wait(10)
        command.end()
        command = project.start("resume", run, "--set", f"processes={ranks}")
        wait_until(lambda: summary(run)["status"] == "running", what="a resumed run")
    finished = command.wait()
    assert finished.code == 0, finished.text
    assert_same_end(run, reference)


def test_sigkill_of_the_launcher_leaves_no_process_and_a_checkpoint(project: Project) -> None:
    config = project.config(task=task(sleep=0.1), **HARD)
    command = project.start("train", config)
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*"))[:1], what="the run's folder")[0])
    rank_pids(run)
    wait_until(lambda: steps_saved(run), what="a checkpoint")
    command.process.kill()
    command.wait()  # fails where a rank is left behind
    assert summary(run)["status"] == "preempted"
    resumed = project.run("resume", run)
    assert resumed.code == 0, resumed.text
    assert summary(run)["status"] == "completed"


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        pytest.param("kill", "ddp", marks=pytest.mark.long),
        pytest.param("hang", "ddp", marks=pytest.mark.long),
        pytest.param("kill", FSDP, id="kill-fsdp"),
        pytest.param("hang", FSDP, marks=pytest.mark.long, id="hang-fsdp"),
    ],
)
def test_restart_policy_goes_on_from_the_newest_checkpoint(project: Project, how: str, strategy: Any) -> None:
    reference = project.train(out="reference", task=task(), strategy=strategy, **HARD)
    fault = {"rank": 1, "step": 8, "how": how, "once": str(project.folder / "once")}
    again: dict[str, Any] = {"launch": {"max_restarts": 2}, "timeouts": {"stall": "3 s"}}
    run = project.train(out="restarted", task=task(fail_at=fault), strategy=strategy, **again, **HARD)
    assert (project.folder / "once").exists()
    assert "restored step-0000000" in (run / "logs" / "rank-0.log").read_text()
    assert_same_end(run, reference)


def test_restarts_are_limited(project: Project) -> None:
    fault = {"rank": 0, "step": 2, "how": "exception"}
    config = project.config(task=task(fail_at=fault), launch={"max_restarts": 1}, **HARD)
    finished = project.run("train", config)
    assert finished.code == 5
    assert finished.err.count("restarting from the newest checkpoint (restart 1 of 1)") == 1
    assert finished.err.count("this example cannot be right") >= 2
