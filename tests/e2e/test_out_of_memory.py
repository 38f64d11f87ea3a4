"""Memory that runs out: which rank, for what, and how to find out what fills it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, Started, summary, wait_until

ADDRESSES = 3_000_000  # KiB: a rank has between one and two thirds of it before its first tensor
# A few tensors of 16 numbers for each of 64 x 200,000 rows.
HUNGRY: dict[str, Any] = {
    "task": {"type": f"{TASK_FILE}:Hungry", "times": 200_000},
    "processes": 1,
    "train": {"steps": 2, "batch_size": 64},
    "data": {},
    "launch": {"threads": 1},
}


def test_a_device_without_memory_ends_a_run_with_how_to_plan_it(project: Project) -> None:
    """Once, after the last of all attempts."""
    config = project.config(
        task={"type": f"{TASK_FILE}:Hungry", "fail_at": {"how": "memory", "rank": 1}}, launch={"max_restarts": 1}
    )
    finished = project.run("train", config)
    assert finished.code == 5, finished.text
    headline = "rank 1 of 2 on .* failed: out of memory: CUDA out of memory. Tried to allocate 20.00 GiB"
    assert len(re.findall(headline, finished.err)) == 2
    run = project.only_run()
    assert (
        len(re.findall(rf"what fills the memory: lockstep plan \S*{run.name}/config.yaml --on DEVICEx2", finished.err))
        == 1
    )
    assert summary(run)["reason"].startswith("out of memory: CUDA out of memory")


def test_a_host_without_memory_ends_a_run_with_what_was_asked_for(project: Project) -> None:
    """Really: the system gives no more."""
    project.config(**HUNGRY)
    command = f'ulimit -v {ADDRESSES}; exec "$@"'
    finished = Started(
        ["bash", "-c", command, "-", sys.executable, "-m", "lockstep", "train", "config.yaml"], project.folder
    ).wait()
    assert finished.code == 5, finished.text
    assert "out of memory: [enforce fail at alloc_cpu.cpp" in finished.err
    assert "what fills the memory: lockstep plan " in finished.err


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
    assert "what fills the memory: lockstep plan " in finished.err
