"""Where ranks are stuck in a model that is spread over them, the message names the block, and the collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Project

TASK = Path(__file__).parent / "block_task.py"


@pytest.mark.parametrize(
    ("where", "stuck", "waiting"),
    [
        ("forward", "the forward pass of layers.b", "the parameters of layers.c"),
        pytest.param("backward", "the backward pass of layers.b", "the gradients of layers.b", marks=pytest.mark.long),
        pytest.param("loss", "loss", "the parameters of layers.c", marks=pytest.mark.long),
        pytest.param("validation", "validation", "the parameters of the model", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_is_named_with_the_block_and_what_others_wait_for(
    project: Project, where: str, stuck: str, waiting: str
) -> None:
    config = project.config(
        task={"type": f"{TASK}:Stuck", "where": where},
        strategy="fsdp",
        train={"steps": 6, "batch_size": 12, "clip_norm": 1.0},
        validation={"every": "3 steps"},
        timeouts={"stall": "3 s", "first_step": "6 s"},
        launch={"threads": 1},
    )
    finished = project.run("train", config)
    assert finished.code == 4, finished.text
    (headline,) = [line for line in finished.err.splitlines() if "rank 1: in " in line]
    assert f"rank 1: in {stuck} of step 3, block_task.py:" in headline, headline
    assert f"; rank 0 waits in {waiting}" in headline, headline
    assert "Traceback" not in finished.text
