"""`lockstep.train` from a program: in this process, on several, under torchrun, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, Started, losses, summary

BASE: dict[str, Any] = {
    "runtime": "cpu",
    "train": {"steps": 4, "batch_size": 10},
    "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
    "log": {"every": "1 step"},
}

PROGRAM = """
import json, os, sys
import torch
import lockstep
import lockstep.engine.run  # which binds the name of the package
from tasks import Tiny

class Mine(Tiny):
    def loss(self, model, batch):
        if os.environ.get("STOP_HERE") and not hasattr(self, "stopped"):
            self.stopped = True
            breakpoint()
        if os.environ.get("BREAK_HERE"):
            raise ValueError("this cannot be right")
        return super().loss(model, batch)

def plain(summary):
    return {**summary, "folder": str(summary["folder"]), "pid": os.getpid()}

if __name__ == "__main__":
    base = json.loads(sys.argv[1])
    values = json.loads(sys.argv[2])
    try:
        ended = lockstep.train(base, task={"type": Mine, "examples": 60}, **values)
    except lockstep.LockstepError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
    except ValueError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
    else:
        print(json.dumps(plain(ended)))
        # Under torchrun the words of all ranks but the first go to their logs.
        with open(f"said-{os.environ.get('RANK', '0')}.json", "w") as stream:
            json.dump(plain(ended), stream)
"""


@pytest.fixture
def program(project: Project) -> list[str]:
    (project.folder / "program.py").write_text(PROGRAM)
    (project.folder / "tasks.py").symlink_to(TASK_FILE)
    return [sys.executable, "program.py", json.dumps(BASE)]


def run(program: list[str], project: Project, env: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    finished = Started([*program, json.dumps(values)], project.folder, env).wait()
    assert finished.code == 0, finished.text
    said: dict[str, Any] = json.loads(finished.out.splitlines()[-1])
    return said


def test_one_process_is_this_one_and_three_give_the_same_losses_also_in_uneven_shares(
    project: Project, program: list[str]
) -> None:
    one = run(program, project, processes=1, out="one", **{"train.steps": 6})
    assert (one["status"], one["step"], one["world_size"]) == ("completed", 6, 1)
    folder = project.only_run("one")
    assert (project.folder / one["folder"], folder.name.split("-")[0]) == (folder, "Mine")
    assert json.loads((folder / "topology.json").read_text())["ranks"][0]["pid"] == one["pid"]

    finished = Started([*program, json.dumps({"processes": 3, "out": "three"})], project.folder).wait()
    assert finished.code == 0, finished.text
    three = json.loads(finished.out.splitlines()[-1])
    assert (three["status"], three["step"], three["world_size"]) == ("completed", 4, 3)
    assert finished.err.count("train.batch_size 10 on 3 processes: ranks get 3 or 4 examples of every batch") == 1
    first = losses(folder)
    assert losses(project.only_run("three")) == pytest.approx({step: first[step] for step in range(1, 5)}, rel=1e-5)

    # What was trained from a program is gone on with by the command.
    resumed = project.run("resume", three["folder"], "--set", "train.steps=6", "--set", "processes=2")
    assert resumed.code == 0, resumed.text
    assert losses(project.only_run("three")) == pytest.approx(first, rel=1e-5)


def test_a_debugger_works_in_one_process(project: Project, program: list[str]) -> None:
    finished = subprocess.run(
        [*program, json.dumps({"processes": 1})],
        # Ray, once it was imported by another test, has breakpoint() call its own debugger.
        cwd=project.folder, env={**os.environ, "STOP_HERE": "1", "PYTHONBREAKPOINT": ""}, input="p 6 * 7\nc\n",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "(Pdb) 42" in finished.stdout


@pytest.mark.parametrize(("processes", "kind"), [(1, "ValueError"), (2, "WorkerFailed")])
def test_a_failure_is_raised(project: Project, program: list[str], processes: int, kind: str) -> None:
    said = run(program, project, {"BREAK_HERE": "1"}, processes=processes)
    assert said["error"] == kind
    assert "this cannot be right" in said["text"]
    assert summary(project.only_run())["status"] == "failed"


def test_under_torchrun_every_rank_gets_the_summary(project: Project, program: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *program[1:]]
    finished = Started([*command, json.dumps({"out": "under"})], project.folder).wait()
    assert finished.code == 0, finished.text
    said = [json.loads((project.folder / f"said-{rank}.json").read_text()) for rank in range(2)]
    folder = project.only_run("under")
    assert {(Path(each["folder"]), each["status"], each["world_size"]) for each in said} == {(folder, "completed", 2)}
