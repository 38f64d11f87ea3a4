"""A GPU's memory that runs out: the plan says so before, and what it advises is enough. Needs a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conftest import TASK_FILE, Finished, Project

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLANNING = "out of memory: planning a step on this machine"
# Of each row, at its peak: five tensors of 16 numbers, or less.
ROW, BATCH = 16 * 4 * 5, 64


def config(project: Project, memory: float, fraction: float | None = None) -> None:
    """A step that needs so many bytes, or about that."""
    task: dict[str, Any] = {"type": f"{TASK_FILE}:Hungry", "times": int(memory / ROW / BATCH), "fraction": fraction}
    project.config(
        task=task, runtime="cuda", processes=1, train={"steps": 2, "batch_size": BATCH}, data={}, plan="check",
        optimizer={"type": "torch.optim.SGD", "lr": 0.1},
    )  # fmt: skip


def remedies(finished: Finished) -> list[str]:
    told = finished.err[finished.err.rindex("cheapest remedies") :]
    return re.findall(r"^lockstep:   (--set .+)$", told, re.M)


@pytest.fixture
def eight_gib_are_free() -> Iterator[None]:
    """Of the GPU, as if somebody else used the rest: tensors that fill it would be larger than some kernels take."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(free - 8 * 2**30, 1), dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("eight_gib_are_free")
def test_a_run_that_does_not_fit_is_told_before_and_after_and_fits_as_advised(project: Project) -> None:
    config(project, 16 * 2**30)
    finished = project.run("train", "config.yaml", limit=300)
    assert finished.code == 5, finished.text
    warned, failed = finished.err.index("warning: plan: DOES NOT FIT"), finished.err.index("CUDA out of memory")
    assert warned < failed < finished.err.index(PLANNING)
    after = finished.err[finished.err.index(PLANNING) :]
    assert "too much" in after and "tasks.py:" in after and "all of the plan: lockstep plan" in after
    told = remedies(finished)
    assert 1 <= len(told) <= 3
    advised = next(each for each in told if "train.compile" not in each)  # which needs a compiler
    trained = project.run("train", "config.yaml", "--out", "again", *advised.split(), limit=300)
    assert trained.code == 0, trained.text
    assert "and fits" in trained.err


def test_what_torch_lets_a_process_have_is_what_a_plan_is_compared_with(project: Project) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    config(project, 8 * 2**30, fraction=3 * 2**30 / total)
    finished = project.run("train", "config.yaml", limit=300)
    assert finished.code == 5, finished.text
    assert "and fits" in finished.err, "of the limit nobody knows before the task sets it"
    assert "too much" in finished.err[finished.err.index(PLANNING) :] and remedies(finished)
