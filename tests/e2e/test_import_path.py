"""Files of the folder that a command is given in, or that a task lies in, that have the names of other modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import Project, Started

pytestmark = pytest.mark.usefixtures("new_interpreters")

TRAP = """
import os, sys
with open(os.path.join({folder!r}, __name__), "a") as marks:
    marks.write(" ".join(sys.orig_argv)[:300] + "\\n")
"""
# Of the standard library and of what is installed; all of them are imported by a launcher, a fork server or a rank.
NAMES = (
    "__future__", "typing", "random", "json", "yaml", "torch", "numpy", "logging", "pickle", "tempfile", "socket",
    "signal", "click", "pydantic", "rich", "multiprocessing", "resource", "shlex", "secrets", "tensorboard",
)  # fmt: skip
TASK = """
import random
import lockstep
import torch
from helpers import HIDDEN
assert "trap" not in (random.__file__ or ""), random.__file__

class Mine(lockstep.Task):
    def model(self):
        return torch.nn.Linear(4, HIDDEN)
    def train_data(self):
        return Examples()
    def loss(self, model, batch):
        import secrets  # not imported by anybody before
        assert secrets.token_hex
        return model(batch).square().mean()

class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((4,), float(index) + random.random())
"""


@pytest.fixture
def trapped(project: Project) -> Project:
    """A project whose folder has a file for each of these names, that notes who imported it."""
    folder = project.folder / "trap"
    (folder / "package").mkdir(parents=True)
    marks = project.folder / "imported"
    marks.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(TRAP.format(folder=str(marks)))
    (folder / "helpers.py").write_text("HIDDEN = 3\n")
    (folder / "my_task.py").write_text(TASK)
    (folder / "package" / "tasks.py").write_text(TASK)
    (folder / "plain.py").write_text("import helpers, random; random.marked = True\n")
    return Project(folder)


def imported(project: Project) -> dict[str, str]:
    return {mark.name: mark.read_text() for mark in (project.folder.parent / "imported").iterdir()}


def config(project: Project, task: str) -> Path:
    return project.config(task=task, train={"epochs": 1, "batch_size": 4}, data={"workers": 1})


LOCKSTEP = str(Path(sys.executable).parent / "lockstep")


def test_nothing_is_imported_from_the_folder_of_a_command(trapped: Project) -> None:
    for argv in ([LOCKSTEP, "--help"], [LOCKSTEP, "train", str(config(trapped, "my_task.py:Mine"))]):
        finished = Started(argv, trapped.folder).wait()
        assert finished.code == 0, finished.text
        assert imported(trapped) == {}


def test_nor_where_python_is_told_to_run_the_module(trapped: Project) -> None:
    """A task in a package of that folder is found all the same, and what lies next to the package."""
    finished = trapped.run("train", config(trapped, "package.tasks:Mine"))
    assert finished.code == 0, finished.text
    assert imported(trapped) == {}
