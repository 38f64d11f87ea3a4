"""`lockstep resume --set optimizer...`: the restored optimizer and its schedule get the new values."""

from __future__ import annotations

import pytest

from conftest import Project, rows


def test_another_learning_rate_counts_from_the_resume_on(project: Project) -> None:
    scheduler = {"type": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}
    run = project.train(scheduler=scheduler)
    limits = ["--set", "train.epochs=3"]
    resumed = project.run("resume", run, *limits, "--set", "optimizer.lr=0.4", "--set", "optimizer.momentum=0.5")
    assert resumed.code == 0, resumed.text
    assert "lockstep: changed: optimizer.lr: 0.1 -> 0.4 (from the first step on" in resumed.err
    log = (run / "logs" / "rank-1.log").read_text()
    assert "optimizer.lr: 0.1 -> 0.4 from here on, with 0.1 now" in log
    assert "optimizer.momentum: 0.9 -> 0.5 from here on" in log
    again = project.run("resume", run, "--set", "train.epochs=4")
    assert again.code == 0, again.text
    assert "from here on" not in (run / "logs" / "rank-1.log").read_text()[len(log) :], "it is what was saved now"
    # 0.1 and half of it in two epochs, then a quarter of 0.4 and an eighth: within an epoch no step changes it.
    rates = {row["epoch"]: row["lr"] for row in rows(run) if "lr" in row and row["step"] % 7 != 0}
    assert rates == pytest.approx({0: 0.1, 1: 0.05, 2: 0.1, 3: 0.05})


TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

class Line(lockstep.Task):
    def model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        x = torch.linspace(-1, 1, 10).reshape(10, 1)
        return TensorDataset(x, 2 * x)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


def test_a_changed_task_is_named(project: Project) -> None:
    task = project.folder / "line.py"
    task.write_text(TASK)
    run = project.train(task=f"{task}:Line", processes=1, data={}, train={"epochs": 3, "batch_size": 5})
    config = (run / "config.yaml").read_bytes()
    refused = project.run("resume", run, "--set", "train.epochs=2")
    assert refused.code == 2 and (run / "config.yaml").read_bytes() == config
    assert f"train.epochs=2: the run in {run} has 3 epochs done at step 6: name more" in refused.err
    assert (run / "code" / "1" / "line.py").read_text() == TASK

    task.write_text(TASK.replace("2 * x", "3 * x"))
    resumed = project.run("resume", run, "--set", "train.epochs=4")
    assert resumed.code == 0, resumed.text
    assert f"the code changed since the run was last started: line.py. What it was is in {run / 'code' / '1'}" in (
        resumed.out
    )
    assert "3 * x" in (run / "code" / "2" / "line.py").read_text()
    assert not (run / "code" / "3").exists()
