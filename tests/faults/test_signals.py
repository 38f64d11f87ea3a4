"""Asked to stop, by whomever: all ranks leave at the same step, after one save, with exit code 75.

A signal to the launcher or to one rank alone, at every moment, is in the fault matrix.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TASK_FILE, Project, Started, losses, rank_pids, steps_saved, summary, wait_until

LONG = {
    "task": {"type": f"{TASK_FILE}:Tiny", "sleep": 0.05},
    "train": {"epochs": 200, "batch_size": 12},
    "checkpoint": {"every": "1000 steps"},
}


def started(project: Project) -> tuple[Started, Path]:
    command = project.start("train", project.config(**LONG))
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*"))[:1], what="the run's folder")[0])
    wait_until(lambda: (run / "metrics.jsonl").exists() and losses(run), what="the first steps")
    return command, run


def terminal(command: Started, run: Path) -> None:
    """Ctrl-C: the terminal sends it to every process of the foreground group."""
    os.killpg(command.process.pid, signal.SIGINT)


def twice_at_once(command: Started, run: Path) -> None:
    """As `timeout` does: the command first, then its group."""
    command.process.send_signal(signal.SIGTERM)
    os.killpg(command.process.pid, signal.SIGTERM)


@pytest.mark.requirement("D18")
@pytest.mark.parametrize("ask", [terminal, twice_at_once], ids=lambda ask: ask.__name__)
def test_one_request_saves_and_leaves_on_all_ranks(project: Project, ask: Callable[[Started, Path], None]) -> None:
    command, run = started(project)
    ask(command, run)
    asked = time.monotonic()
    finished = command.wait()
    assert time.monotonic() - asked < 30
    assert finished.code == 75, finished.text
    assert "Traceback" not in finished.text
    assert f"lockstep resume {run.relative_to(project.folder)}" in finished.err
    end = summary(run)
    assert end["status"] == "preempted"
    assert steps_saved(run) == [end["step"]]
    assert max(losses(run)) == end["step"]
    # Both ranks left at the same step, and the run goes on from there.
    resumed = project.run("resume", run, "--set", f"train={{steps: {end['step'] + 3}, batch_size: 12}}")
    assert resumed.code == 0, resumed.text
    assert list(losses(run)) == list(range(1, end["step"] + 4))


def test_asked_twice_it_ends_at_once(project: Project) -> None:
    command, run = started(project)
    # Ranks that cannot react: only the second request, which does not ask them, can end them.
    for pid in rank_pids(run).values():
        os.kill(pid, signal.SIGSTOP)
    os.killpg(command.process.pid, signal.SIGINT)
    time.sleep(1.5)
    assert command.process.poll() is None, "once waits for a clean save"
    asked = time.monotonic()
    os.killpg(command.process.pid, signal.SIGINT)
    code = command.process.wait(15)
    assert time.monotonic() - asked < 15
    assert code == 130
    assert command.wait().code == 130


def test_a_signal_while_ranks_are_starting_leaves_no_process(project: Project) -> None:
    command = project.start("train", project.config(**LONG))
    runs = project.folder / "runs"
    wait_until(lambda: runs.is_dir() and any(runs.iterdir()), what="processes to be started")
    time.sleep(0.3)
    command.process.send_signal(signal.SIGTERM)
    finished = command.wait()
    saved = steps_saved(project.only_run())
    assert finished.code == (75 if saved else 130), finished.text
    assert ("saved and stopped" if saved else "there was nothing to save") in finished.err
    assert "Traceback" not in finished.err


def test_a_request_to_save_is_one_save_on_all_ranks_and_training_goes_on(project: Project) -> None:
    command, run = started(project)
    os.kill(rank_pids(run)[1], signal.SIGUSR1)  # one rank alone
    first = wait_until(lambda: steps_saved(run), what="a checkpoint")
    command.process.send_signal(signal.SIGUSR1)  # the launcher
    both = wait_until(lambda: len(steps_saved(run)) == 2 and steps_saved(run), what="another checkpoint")
    assert both[0] == first[0]
    wait_until(lambda: max(losses(run)) > both[1] + 3, what="training to go on")
    assert steps_saved(run) == both, "one request, one save"
    command.process.send_signal(signal.SIGTERM)
    assert command.wait().code == 75
    log = (run / "logs" / "rank-0.log").read_text()
    assert f"saved at step {both[0]}: SIGUSR1 on rank 1" in log
    assert f"saved at step {both[1]}: SIGUSR1 on rank 0" in log
