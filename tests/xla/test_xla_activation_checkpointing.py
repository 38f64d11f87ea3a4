"""Blocks that are computed again in the backward pass, on XLA devices: the same numbers, in a program that does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from xla_ways import needs_torch_xla, on_xla

from conftest import TASK_FILE, Project, losses

pytestmark = needs_torch_xla

# Each with dropout, which has to draw the same numbers again, and with statistics that must not move twice.
STACKED = {"type": f"{TASK_FILE}:Stacked", "dropout": 0.2, "batch_norm": True}
WAYS: dict[str, dict[str, Any]] = {
    "single": on_xla("single"),
    "ddp-2": on_xla("ddp", processes=2),
    "threads-2": on_xla("threads", 2),
    "spmd-4": on_xla("spmd", 4),
    "fsdp-4": on_xla("fsdp", 4),
}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_with_it_and_without(project: Project, way: str, precision: str) -> None:
    train = {"epochs": 2, "batch_size": 16, "precision": precision}
    settings: dict[str, Any] = {"task": STACKED, **WAYS[way]}
    usual = project.train(out="usual", train=train, **settings)
    run = project.train(out="recomputed", train={**train, "activation_checkpointing": "blocks"}, **settings)
    # XLA may fuse a program with barriers in it otherwise, and round otherwise.
    tolerance = 1e-5 if precision == "float32" else 1e-2
    assert losses(run) == pytest.approx(losses(usual), rel=tolerance)
    before, after = weights(usual), weights(run)
    assert list(before) == list(after)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.long
def test_the_program_computes_it_twice() -> None:
    """Without a barrier XLA would see that the same is computed twice, and keep it instead."""
    body, tests = Path(__file__).with_name("xla_bodies.py"), str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, body, "recomputed_program"], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=180,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.strip().splitlines()[-1])
    assert found["barriers"] == {"usual": 0, "recomputed": 3}
    assert found["products"]["recomputed"] > found["products"]["usual"]


def test_the_step_is_compiled_in_its_first_steps_only(project: Project) -> None:
    run = project.train(
        task=STACKED, train={"epochs": 4, "batch_size": 16, "activation_checkpointing": "blocks"}, **WAYS["single"]
    )
    assert "compiled anew" not in (run / "logs" / "rank-0.log").read_text()
