"""However a run is told to stop, it saves, leaves in time, says so truly, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import TASK_FILE, Project, Started, losses, rank_pids, steps_saved, summary, wait_until

LONG: dict[str, Any] = {
    "task": {"type": f"{TASK_FILE}:Tiny", "sleep": 0.05},
    "train": {"epochs": 200, "batch_size": 12},
    "checkpoint": {"every": "1000 steps"},
}
WORKERS = {**LONG, "data": {"split": {"train": 0.8, "val": 0.2}, "workers": 2}}


def under_way(command: Started, project: Project) -> Path:
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*"))[:1], what="the run's folder")[0])
    wait_until(lambda: (run / "metrics.jsonl").exists() and losses(run), what="the first steps")
    return run


def undisturbed_by_asking(project: Project, command: Started, run: Path) -> None:
    """It has saved, says so, and goes on from there."""
    finished = command.wait(60)
    end = summary(run)
    assert finished.code == 75, finished.text
    assert "saved and stopped" in finished.err
    assert "Traceback" not in finished.text
    assert end["status"] == "preempted"
    assert steps_saved(run) == [end["step"]]
    assert list(losses(run)) == list(range(1, end["step"] + 1))


@pytest.mark.parametrize(
    ("processes", "number"),
    [
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.long),
        (2, signal.SIGTERM),
        (2, signal.SIGHUP),
        pytest.param(2, signal.SIGQUIT, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_the_whole_group_does_not_end_the_data_workers(
    project: Project, processes: int, number: signal.Signals
) -> None:
    command = project.start("train", project.config(**{**WORKERS, "processes": processes}))
    run = under_way(command, project)
    os.killpg(command.process.pid, number)
    undisturbed_by_asking(project, command, run)


def test_repeated_requests_to_stop_wait_for_the_save_and_meaningless_signals_for_nothing(project: Project) -> None:
    command = project.start("train", project.config(**LONG))
    run = under_way(command, project)
    for number in (signal.SIGUSR2, signal.SIGALRM, signal.SIGPROF):
        command.process.send_signal(number)
    first = max(losses(run))
    wait_until(lambda: max(losses(run)) > first + 3, what="training to go on")
    for pid in rank_pids(run).values():  # so that the save has to wait
        os.kill(pid, signal.SIGSTOP)
    for _ in range(3):
        command.process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
    for pid in rank_pids(run).values():
        os.kill(pid, signal.SIGCONT)
    undisturbed_by_asking(project, command, run)


def test_nohup_means_what_it_says(project: Project) -> None:
    config = project.config(**{**LONG, "train": {"steps": 40, "batch_size": 12}})
    ignoring = "import os, signal as s, sys; s.signal(s.SIGHUP, s.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = project.start_python("-c", ignoring, sys.executable, "-m", "lockstep", "train", config)
    run = under_way(command, project)
    os.killpg(command.process.pid, signal.SIGHUP)
    finished = command.wait()
    assert finished.code == 0, finished.text
    assert max(losses(run)) == 40


SLOWING = """
import time
import torch
from tasks import Tiny as Base


class Tiny(Base):
    def loss(self, model, batch):
        if model.training and self.calls > 300:
            time.sleep(2.5)
        return super().loss(model, batch)
"""


def test_steps_that_become_slow_are_asked_in_time(project: Project) -> None:
    """Fast steps plan the next pulse hundreds of steps ahead; at 2.5 s each that would be many minutes."""
    (project.folder / "slowing.py").write_text(SLOWING)
    values = {**LONG, "task": {"type": "slowing.py:Tiny", "examples": 1200}, "log": {"every": "1 step"}}
    command = project.start("train", project.config(**values), env={"PYTHONPATH": str(TASK_FILE.parent)})
    run = under_way(command, project)
    wait_until(lambda: max(losses(run)) > 300, what="the slow steps")
    time.sleep(1)
    asked = time.monotonic()
    os.kill(rank_pids(run)[1], signal.SIGTERM)  # one rank alone: the others hear of it from there
    undisturbed_by_asking(project, command, run)
    assert time.monotonic() - asked < 25


VALIDATING = """
import time
from pathlib import Path
from tasks import Tiny as Base

HERE = Path(__file__).parent


class Tiny(Base):
    def metrics(self, model, batch):
        if (HERE / "slow").exists():
            (HERE / "validating").touch()
            time.sleep(1.0)
        return super().metrics(model, batch)
"""


@pytest.mark.parametrize("every", ["5 steps", pytest.param("1 epoch", marks=pytest.mark.long)])
def test_a_request_in_a_long_validation_is_heard_and_the_validation_is_made_up_for(
    project: Project, every: str
) -> None:
    (project.folder / "validating.py").write_text(VALIDATING)
    values = {
        "task": {"type": "validating.py:Tiny", "examples": 400, "dropout": 0.3},
        "train": {"epochs": 2, "batch_size": 24},
        "validation": {"every": every, "batch_size": 4},
        "scheduler": {"type": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5, "every": every},
        "checkpoint": {"every": "1000 steps"},
    }
    environment = {"PYTHONPATH": str(TASK_FILE.parent)}
    whole = project.folder / "whole"
    assert project.run("train", project.config(**values), "--out", whole, env=environment).code == 0
    (project.folder / "slow").touch()
    command = project.start("train", project.config(**values), env=environment)
    wait_until(lambda: (project.folder / "validating").exists(), what="validation")
    run = project.only_run()
    time.sleep(1.0)
    (project.folder / "slow").unlink()
    (project.folder / "slow").touch()
    asked = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    finished = command.wait()
    assert finished.code == 75, finished.text
    assert time.monotonic() - asked < 8, "ten more batches of a second each were not waited for"
    (project.folder / "slow").unlink()
    resumed = project.run("resume", run, env=environment)
    assert resumed.code == 0, resumed.text
    reference = project.only_run("whole")

    def told(each: Path) -> list[Any]:
        import json

        dropped = ("examples_per_second", "seconds")
        lines = [json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if name not in dropped} for line in lines]

    assert told(run) == told(reference)
    assert summary(run)["metrics"] == summary(reference)["metrics"]


STUCK = """
import os
import subprocess
import sys
import time
import torch
from tasks import Tiny as Base


class Stuck(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None and index == 40:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=False)
            while True:
                time.sleep(1)
        return self.data[index]


class Tiny(Base):
    def train_data(self):
        return Stuck(super().train_data())
"""


def test_no_process_outlives_the_run_whatever_state_it_is_in(project: Project) -> None:
    """A data worker that hangs, with a process of its own; the launcher ends the run, and then all of it is gone."""
    (project.folder / "stuck.py").write_text(STUCK)
    values = {**WORKERS, "task": {"type": "stuck.py:Tiny"}, "timeouts": {"stall": "3 s", "first_step": "6 s"}}
    command = project.start("train", project.config(**values), env={"PYTHONPATH": str(TASK_FILE.parent)})
    finished = command.wait(60)  # fails where a process is left
    assert finished.code == 4, finished.text
    line = STUCK.split("\n").index("                time.sleep(1)") + 1
    assert re.search(
        rf"rank \d: in data of step \d+, data worker [01] \(pid \d+\) at stuck\.py:{line}, since", finished.err
    ), finished.err


@pytest.mark.long
def test_no_process_outlives_a_launcher_that_was_killed(project: Project) -> None:
    (project.folder / "stuck.py").write_text(STUCK)
    values = {**WORKERS, "task": {"type": "stuck.py:Tiny"}}
    command = project.start("train", project.config(**values), env={"PYTHONPATH": str(TASK_FILE.parent)})
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*"))[:1], what="the run's folder")[0])
    ranks = rank_pids(run)
    wait_until(
        lambda: any("time.sleep(600)" in " ".join(each.cmdline()) for each in command.members()),
        what="the hanging worker",
    )
    assert all(psutil.pid_exists(pid) for pid in ranks.values())
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    assert not command.wait_for_leftovers(limit=90)
    command.end()


EXITING = """
import sys
from tasks import Tiny as Base


class Tiny(Base):
    def __init__(self, code=0):
        super().__init__()
        self.code = code

    def loss(self, model, batch):
        import os

        if model.training and os.environ["RANK"] == "1" and self.calls == 4:
            sys.exit(self.code)
        return super().loss(model, batch)
"""


@pytest.mark.parametrize("code", [0, pytest.param(75, marks=pytest.mark.long)])
def test_a_rank_that_calls_sys_exit_is_told_of_at_once(project: Project, code: int) -> None:
    (project.folder / "exiting.py").write_text(EXITING)
    values = {**LONG, "task": {"type": "exiting.py:Tiny", "code": code}}
    began = time.monotonic()
    finished = project.run("train", project.config(**values), env={"PYTHONPATH": str(TASK_FILE.parent)})
    assert finished.code == 5, finished.text
    assert "rank 1 of 2 on " in finished.err
    assert f"sys.exit({code}) was called at exiting.py:15, before the work was done" in finished.err
    assert time.monotonic() - began < 45


def test_a_fork_server_that_is_killed_is_named(project: Project) -> None:
    command = project.start("train", project.config(**LONG))
    run = under_way(command, project)
    server = psutil.Process(rank_pids(run)[0]).ppid()
    os.kill(server, signal.SIGKILL)
    finished = command.wait(60)
    assert finished.code == 5, finished.text
    assert f"the fork server (pid {server})" in finished.err.splitlines()[-3]
    assert steps_saved(run), "the ranks saved before they left"


def test_ctrl_c_while_a_run_starts_is_one_line(project: Project) -> None:
    """At four moments of the first two seconds, from the import of the command line on."""
    config = project.config(**LONG)
    for moment in range(4):
        command = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", str(config), "--out", f"out-{moment}"], cwd=project.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        time.sleep(0.2 + 0.6 * moment)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert command.returncode in (130, 75, -signal.SIGINT), (moment, out, err)
        assert "Traceback" not in out + err, (moment, out, err)
        folder = project.folder / f"out-{moment}"
        saved = [step for run in folder.glob("*") for step in steps_saved(run)]
        assert (command.returncode == 75) == bool(saved), (moment, out, err)
