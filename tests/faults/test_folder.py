"""A run's folder: one writer at a time, moved or deleted under a run, open to whom the umask says."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import psutil
import pytest

from conftest import TASK_FILE, Project, Started, rank_pids, steps_saved, wait_until

SLOW = {"type": f"{TASK_FILE}:Tiny", "sleep": 0.05}
# Holds the folder `run` until the file `go` is there.
SCRIPT = """
import sys, time
from pathlib import Path
import lockstep

def main(run):
    if run.is_main:
        Path("holds").touch()
        while not Path("go").exists():
            time.sleep(0.05)
    run.barrier()

if __name__ == "__main__":
    lockstep.launch(main, processes=int(sys.argv[1]), runtime="cpu", folder="run")
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def refused(finished: object, *names: str) -> None:
    text = finished.text  # type: ignore[attr-defined]
    assert finished.code != 0 and "another run is at work in this folder" in text, text  # type: ignore[attr-defined]
    for name in names:
        assert name in text, text


@pytest.mark.parametrize(
    "holder", ["two processes", *(pytest.param(each, marks=pytest.mark.long) for each in ("one process", "torchrun"))]
)
def test_one_writer_per_folder_however_it_was_started(project: Project, holder: str) -> None:
    (project.folder / "script.py").write_text(SCRIPT)
    alone, together = ("script.py", "1"), ("script.py", "2")
    ways = {"one process": alone, "two processes": together, "torchrun": (*TORCHRUN, *together)}
    others = {"one process": "torchrun", "torchrun": "one process", "two processes": "one process"}
    first = project.start_python(*ways[holder])
    try:
        wait_until((project.folder / "holds").exists, what="a run that holds its folder")
        aside = project.folder / "aside"  # where the second command's output goes
        aside.mkdir()
        for file in ("script.py", "run"):
            (aside / file).symlink_to(project.folder / file)
        second = Started([sys.executable, *ways[others[holder]]], aside).wait()
        who = {"one process": "its only process", "torchrun": "rank 0", "two processes": "its launcher"}[holder]
        refused(second, f"{who}, process ")
        assert not (aside / "holds").exists()
        if holder == "one process":
            again = Started([sys.executable, "-m", "lockstep", "resume", "run"], aside).wait()
            refused(again, f"process {first.process.pid} on")
    finally:
        (project.folder / "go").touch()
        finished = first.wait()
    assert finished.code == 0, finished.text


def test_nobody_resumes_while_the_ranks_of_a_killed_launcher_are_there(project: Project) -> None:
    config = project.config(task=SLOW, train={"steps": 100, "batch_size": 12}, checkpoint={"every": "5 steps"})
    command = project.start("train", config, "--out", "runs")
    wait_until(lambda: list(project.folder.glob("runs/*/checkpoints/step-*")), what="a checkpoint")
    run = project.only_run()
    rank = psutil.Process(rank_pids(run)[0])
    aside = project.folder / "aside"  # where another command's output goes
    aside.mkdir()
    resume = [sys.executable, "-m", "lockstep", "resume", str(run), "--set", "train.steps=101"]
    try:
        rank.suspend()  # so that it takes its time
        command.process.send_signal(signal.SIGKILL)
        command.process.wait(10)
        second = Started(resume, aside).wait()
        refused(second, f"rank 0, process {rank.pid} on", "Its launcher is gone")
        assert second.code == 2 and "steps: 100" in (run / "config.yaml").read_text(), "nothing was changed"
        rank.resume()
        assert not command.wait_for_leftovers(60)
    finally:
        command.end()
    before = max(steps_saved(run))
    third = Started(resume, aside).wait()
    assert third.code == 0 and f"restored step-{before:08d}" in third.text, third.text


@pytest.mark.parametrize("how", ["moved", pytest.param("deleted", marks=pytest.mark.long)])
def test_a_folder_that_goes_away_under_a_run_ends_it_with_a_message(project: Project, how: str) -> None:
    config = project.config(
        task=SLOW, train={"steps": 4000, "batch_size": 12}, checkpoint={"every": "5 steps"}, launch={"max_restarts": 2}
    )
    command = project.start("train", config, "--out", "runs")
    wait_until(lambda: list(project.folder.glob("runs/*/checkpoints/step-*")), what="a checkpoint")
    run, elsewhere = project.only_run(), project.folder / "elsewhere"
    run.rename(elsewhere)
    if how == "deleted":
        shutil.rmtree(elsewhere)
    finished = command.wait()
    assert finished.code == 5, finished.text
    said = f"moved to {elsewhere}" if how == "moved" else "deleted"
    assert f"{run}: the run's folder was {said} while the run was at work" in finished.err
    assert "Traceback" not in finished.err and "restarting" not in finished.err
    assert not run.exists(), "a folder without a config"
    if how == "moved":
        resumed = project.run("resume", elsewhere, "--set", f"train.steps={max(steps_saved(elsewhere)) + 1}")
        assert resumed.code == 0, resumed.text


def test_every_file_of_a_run_follows_the_umask(project: Project) -> None:
    before = os.umask(0o002)  # a group that works together
    try:
        run = project.train("--profile", train={"steps": 30, "batch_size": 12})
    finally:
        os.umask(before)
    modes = {path.relative_to(run): path.stat().st_mode & 0o777 for path in [run, *run.rglob("*")]}
    wrong = {str(path): oct(mode) for path, mode in modes.items()
             if mode != (0o775 if (run / path).is_dir() else 0o664)}  # fmt: skip
    assert wrong == {}
    assert {"config.yaml", "summary.json", "metrics.jsonl", "topology.json", "logs", "checkpoints", "profile",
            ".lock"} <= {path.name for path in run.iterdir()}  # fmt: skip
