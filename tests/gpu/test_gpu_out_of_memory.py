"""A GPU's memory that runs out: the error says which rank, and how to find out what fills it. Needs a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from conftest import TASK_FILE, Project

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Of each row, at its peak: five tensors of 16 numbers, or less.
ROW, BATCH = 16 * 4 * 5, 64


@pytest.fixture
def eight_gib_are_free() -> Iterator[None]:
    """Of the GPU, as if somebody else used the rest: tensors that fill it would be larger than some kernels take."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(free - 8 * 2**30, 1), dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("eight_gib_are_free")
def test_a_run_that_does_not_fit_says_how_to_plan_it_and_fits_in_parts(project: Project) -> None:
    project.config(
        task={"type": f"{TASK_FILE}:Hungry", "times": 16 * 2**30 // ROW // BATCH}, runtime="cuda", processes=1,
        train={"steps": 2, "batch_size": BATCH}, data={}, optimizer={"type": "torch.optim.SGD", "lr": 0.1},
    )  # fmt: skip
    finished = project.run("train", "config.yaml", limit=300)
    assert finished.code == 5, finished.text
    assert re.search("rank 0 of 1 on .* failed: out of memory: CUDA out of memory", finished.err)
    assert re.search(r"what fills the memory: lockstep plan \S+ --on DEVICEx1", finished.err)
    trained = project.run("train", "config.yaml", "--out", "again", "--set", "train.accumulate=4", limit=300)
    assert trained.code == 0, trained.text
