"""Memory that runs out: what is said before a run that will not fit, and at the end of one that did not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Finished, Project, Started, summary, wait_until

PLANNING = "out of memory: planning a step on this machine"
ADDRESSES = 3_000_000  # KiB: a rank has between one and two thirds of it before its first tensor
# A few tensors of 16 numbers for each of 64 x 200,000 rows.
HUNGRY: dict[str, Any] = {
    "task": {"type": f"{TASK_FILE}:Hungry", "times": 200_000},
    "processes": 1,
    "train": {"steps": 2, "batch_size": 64},
    "data": {},
    "launch": {"threads": 1},
}


def limited(project: Project, *arguments: str) -> Started:
    """A command whose processes may have so much of addresses each, and no more."""
    command = f'ulimit -v {ADDRESSES}; exec "$@"'
    return Started(["bash", "-c", command, "-", sys.executable, "-m", "lockstep", *arguments], project.folder)


def remedies(finished: Finished) -> list[str]:
    """What is to be set, each as the last plan that was printed says it."""
    told = finished.err[finished.err.rindex("cheapest remedies") :]
    return re.findall(r"^lockstep:   (--set .+)$", told, re.M)


def test_a_device_without_memory_ends_a_run_with_a_plan_and_remedies(project: Project) -> None:
    """Once, after the last of all attempts; by the plan it fits this machine, which is told."""
    config = project.config(
        task={"type": f"{TASK_FILE}:Hungry", "times": 1000, "fail_at": {"how": "memory", "rank": 1}},
        train={"steps": 2, "batch_size": 64},
        launch={"max_restarts": 1},
    )
    finished = project.run("train", config)
    assert finished.code == 5, finished.text
    headline = "rank 1 of 2 on .* failed: out of memory: CUDA out of memory. Tried to allocate 20.00 GiB"
    assert len(re.findall(headline, finished.err)) == 2 and finished.err.count(PLANNING) == 1
    after = finished.err[finished.err.index(PLANNING) :]
    assert re.search(r"a step needs [\d.]+ MiB at its peak in the \w+ pass", after)
    assert "activations" in after and "tasks.py:" in after and "so a step fits" in after
    assert "--set train.accumulate=2" in remedies(finished)
    assert summary(project.only_run())["reason"].startswith("out of memory: CUDA out of memory")


def test_a_host_without_memory_ends_a_run_with_a_plan_and_remedies(project: Project) -> None:
    """Really: the system gives no more."""
    project.config(**HUNGRY)
    finished = limited(project, "train", "config.yaml").wait()
    assert finished.code == 5, finished.text
    assert "out of memory: [enforce fail at alloc_cpu.cpp" in finished.err[: finished.err.index(PLANNING)]
    assert len(re.findall(r"a step needs [\d.]+ GiB .* too much", finished.err)) == 1
    told = remedies(finished)
    assert any("--set train.accumulate=" in each for each in told) and len(told) <= 3, finished.err
    assert re.search(r"needs [\d.]+ [GM]iB, [\d.]+ GiB less; takes (the same|\d+% more) time", finished.err)


def test_a_run_that_fits_is_said_to_before_it_starts(project: Project) -> None:
    finished = project.run("train", project.config(plan="check", train={"steps": 2, "batch_size": 12}))
    assert finished.code == 0, finished.text
    fits = re.search(
        r"plan: a step needs [\d.]+ KiB of the [\d.]+ GiB that each of 2 processes has .*, and fits", finished.err
    )
    assert fits is not None and fits.start() < finished.err.index("2 processes on cpu"), finished.err


@pytest.mark.long
def test_what_will_not_fit_is_told_before_and_remedies_are_enough(project: Project) -> None:
    """Under the same limit: what is advised trains."""
    project.config(**HUNGRY, plan="check")
    finished = limited(project, "train", "config.yaml").wait()
    assert finished.code == 5, finished.text
    warned, failed = finished.err.index("warning: plan: DOES NOT FIT"), finished.err.index("out of memory: [enforce")
    assert warned < finished.err.index("training starts all the same") < failed < finished.err.index(PLANNING)
    assert len(re.findall(r"a step needs [\d.]+ GiB .* too much", finished.err)) == 2
    for number, remedy in enumerate(remedies(finished)):
        trained = limited(project, "train", "config.yaml", "--out", f"again-{number}", *remedy.split()).wait()
        assert trained.code == 0, f"{remedy}\n{trained.text}"
        assert "and fits" in trained.err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_does_not_wait_for_the_plan_gets_the_exit_code_of_the_run(project: Project, number: int) -> None:
    task = {"type": f"{TASK_FILE}:Hungry", "fail_at": {"how": "memory", "rank": 0}}
    started = project.start("train", project.config(task=task, processes=1))
    wait_until(lambda: PLANNING in (project.folder / ".stderr").read_text(), what="the plan")
    time.sleep(0.5)
    os.kill(started.process.pid, number)
    finished = started.wait(10)
    assert finished.code == 5, finished.text
    assert "a step needs" not in finished.err


READS = """
from tasks import Tiny

class Reads(Tiny):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if loss.item() > 0 else loss * 2
"""


@pytest.mark.long
def test_what_cannot_be_planned_trains_all_the_same(project: Project) -> None:
    (project.folder / "tasks.py").write_text(Path(TASK_FILE).read_text())
    (project.folder / "reads.py").write_text(READS)
    finished = project.run("train", project.config(task="reads.py:Reads", plan="check"))
    assert finished.code == 0, finished.text
    assert "warning: plan: check: not checked: reads.py:7 return loss if loss.item()" in finished.err
    run = project.only_run()
    resumed = project.run("resume", run, "--set", "train.epochs=3", "--dry-run")
    assert resumed.code == 0 and "plan: check" in resumed.out, resumed.text


@pytest.mark.long
def test_where_nothing_is_checked_it_is_said(project: Project) -> None:
    config = project.config(plan="check", processes=1)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511"}  # fmt: skip
    finished = project.run("train", config, env=rank)
    assert finished.code == 0, finished.text
    assert "plan: check: not checked where another launcher starts the ranks; ask before: lockstep plan" in finished.err


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of a gigabyte and a half."""
    lines = dict(reversed(line.split(":", 2)[1:]) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path for path, names in lines.items() if names == "memory"), None)
    if own is not None:
        group, limit = (
            Path("/sys/fs/cgroup/memory") / own.strip("/") / f"lockstep-{os.getpid()}",
            "memory.limit_in_bytes",
        )
    else:
        group, limit = Path("/sys/fs/cgroup") / f"lockstep-{os.getpid()}", "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text("1500000000")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    wait_until(lambda: subprocess.run(["rmdir", str(group)], capture_output=True).returncode == 0)


@pytest.mark.long
def test_a_rank_that_the_kernel_ends_for_its_memory_is_told_from_one_that_was_killed(
    project: Project, small_group: Path
) -> None:
    project.config(**{**HUNGRY, "processes": 2})
    command = f'echo $$ > {small_group / "cgroup.procs"} && exec "$@"'
    finished = Started(
        ["bash", "-c", command, "-", sys.executable, "-m", "lockstep", "train", "config.yaml"], project.folder
    ).wait()
    assert finished.code == 5, finished.text
    assert "killed by SIGKILL: the kernel has ended it for lack of memory" in finished.err
    assert "too much" in finished.err[finished.err.index(PLANNING) :] and remedies(finished)
