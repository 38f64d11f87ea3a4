"""Output that breaks never breaks a run: what cannot be written is dropped, and the exit code is that of the run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import TASK_FILE, Project, losses, steps_saved, summary, wait_until

PRINTING = """
import sys
from tasks import Tiny as Base


class Tiny(Base):
    def loss(self, model, batch):
        print("a line of the task's own", flush=True)
        print("and one more", file=sys.stderr, flush=True)
        return super().loss(model, batch)
"""


def command(project: Project, **values: object) -> str:
    (project.folder / "printing.py").write_text(PRINTING)
    settings = {"task": {"type": "printing.py:Tiny", "sleep": 0.02}, "train": {"epochs": 2, "batch_size": 12}, **values}
    return shlex.join([sys.executable, "-m", "lockstep", "train", str(project.config(**settings))])


def shell(project: Project, line: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(TASK_FILE.parent)}
    return subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {line}"], cwd=project.folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


# Whoever reads stops reading; the disk is full; it was closed from the start; it does not block, and is full.
BROKEN = [
    "2>&1 | head -1",
    pytest.param("> /dev/full 2> /dev/full", marks=pytest.mark.long),
    ">&- 2>&-",
    pytest.param("2>&1 | (sleep 0.5; exec <&-; sleep 4)", marks=pytest.mark.long),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_run_ends_well_whatever_becomes_of_its_output(project: Project, broken: str) -> None:
    started = shell(project, f"{command(project)} {broken}")
    out, err = started.communicate(timeout=90)
    assert started.returncode == 0, out + err
    assert "Traceback" not in out + err
    run = project.only_run()
    assert summary(run)["status"] == "completed"
    assert "roll call" in (run / "logs" / "rank-0.log").read_text(), "the log files have it"


def test_ctrl_c_that_also_ends_tee_still_saves(project: Project) -> None:
    line = command(project, train={"epochs": 200, "batch_size": 12}, checkpoint={"every": "1000 steps"})
    started = shell(project, f"{line} 2>&1 | tee log")
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*"))[:1], what="the run's folder")[0])
    wait_until(lambda: (run / "metrics.jsonl").exists() and losses(run), what="the first steps")
    time.sleep(0.5)
    os.killpg(started.pid, signal.SIGINT)
    started.communicate(timeout=60)
    wait_until(lambda: summary(run).get("status") == "preempted" if (run / "summary.json").exists() else None,
               what="an orderly end")  # fmt: skip
    assert steps_saved(run) == [summary(run)["step"]]
