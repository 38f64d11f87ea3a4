"""Failures that look like others: a dead data worker, memory and shared memory that ran out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Project, Started

TASK = """
import os
import signal
import time

import lockstep
import torch
from torch.utils.data import Dataset


class Failing(lockstep.Task):
    def __init__(self, how: str) -> None:
        self.how = how

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        return Examples(self.how)

    def loss(self, model, batch):
        if self.how == "memory" and os.environ["RANK"] == "1":
            torch.empty(2**52)
        return model(batch[:, :4]).square().mean()


class Examples(Dataset):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 32 and self.how == "worker" and os.environ["RANK"] == "1":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(100_000 if self.how == "shared memory" else 4)
"""


def config(project: Project, how: str) -> Path:
    (project.folder / "failing.py").write_text(TASK)
    return project.config(
        task={"type": "failing.py:Failing", "how": how}, train={"epochs": 1, "batch_size": 8},
        data={"workers": 1, "shuffle": False},
    )  # fmt: skip


def test_a_data_worker_that_was_killed_is_named(project: Project) -> None:
    finished = project.run("train", config(project, "worker"))
    assert finished.code == 5
    assert "rank 1 of 2 on" in finished.err and "failed: a data worker died: DataLoader worker (pid" in finished.err
    assert "lower data.workers" in finished.err and "Traceback" not in finished.err


def test_memory_that_ran_out_is_named_with_the_line_that_asked_for_it(project: Project) -> None:
    finished = project.run("train", config(project, "memory"))
    assert finished.code == 5
    assert "rank 1 of 2 on" in finished.err and "failed: out of memory: " in finished.err
    assert "lower train.batch_size, or raise train.accumulate" in finished.err
    assert "torch.empty(2**52)" in finished.err and finished.err.count("Traceback") == 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a small /dev/shm takes root to make")
def test_shared_memory_that_is_full_is_named(project: Project) -> None:
    command = [sys.executable, "-m", "lockstep", "train", str(config(project, "shared memory"))]
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    finished = Started([*small, *command], project.folder).wait()
    assert finished.code == 5
    assert "shared memory is full" in finished.err and "/dev/shm has 0.1 MB" in finished.err
    assert "Traceback" not in finished.err
    full = [each.replace("64k", "4k") for each in small]
    finished = Started([*full, *command, "--set", "data.workers=0"], project.folder).wait()
    assert finished.code == 0, "nothing but data workers needs it"
