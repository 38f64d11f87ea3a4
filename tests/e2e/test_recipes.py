"""Every recipe of docs/recipes.md trains with the same losses on one process and on two, and after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import lockstep
from conftest import ROOT, Project

RECIPES = ROOT / "examples" / "recipes"
CONFIG = yaml.safe_load((RECIPES / "any.yaml").read_text())
PAGE = (ROOT / "docs" / "recipes.md").read_text()
TASKS = re.findall(r"--set task=(\w+\.py:\w+)", PAGE)


def train(task: str, out: Path, processes: int) -> list[float]:
    limits = {"steps": 12, "batch_size": 32}
    values = {**CONFIG, "task": f"{RECIPES / task}", "processes": processes, "runtime": "cpu", "train": limits}
    return losses(lockstep.train(values, out=out, log={"every": "1 step"})["folder"])


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "examples_per_second" in row]
    return [next(row[name] for name in row if name.startswith("train/")) for row in steps]


def test_the_page_has_them_all() -> None:
    assert {each.partition(":")[0] for each in TASKS} == {each.name for each in RECIPES.glob("*.py")}


SHORT = ("wgan_gp.py:Wgan", "clip.py:Clip", "reinforce.py:Reinforce", "folds.py:Folds")


@pytest.mark.parametrize(
    "task", [each if each in SHORT else pytest.param(each, marks=pytest.mark.long) for each in TASKS]
)
def test_two_processes_compute_what_one_does(task: str, tmp_path: Path) -> None:
    one, two = (train(task, tmp_path / str(processes), processes) for processes in (1, 2))
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-5)


def test_carried_state_is_resumed(project: Project) -> None:
    """In the midst of an epoch, on two processes, each with the state of its own texts."""
    task = "carried_state.py:CarriedState"
    settings = ["--set", f"task={task}", "--set", "train={steps: 7, batch_size: 32}", "--set", "log.every=1 step"]
    assert project.run("train", RECIPES / "any.yaml", *settings).code == 0
    run = project.only_run()
    assert project.run("resume", run, "--set", "train.steps=12").code == 0
    assert losses(run) == pytest.approx(train(task, project.folder / "whole", 2), rel=1e-6)
