"""`train.activation_checkpointing` and `train.compile: blocks` through the command line: the same run, on one
process and on two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT, TASK_FILE, Project, losses

STACKED = {"type": f"{TASK_FILE}:Stacked", "dropout": 0.2, "batch_norm": True}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_recomputing_changes_no_bit_of_a_run(project: Project, processes: int) -> None:
    train: dict[str, Any] = {"epochs": 2, "batch_size": 24, "accumulate": 2, "clip_norm": 1.0, "precision": "bf16"}
    settings: dict[str, Any] = {"task": STACKED, "processes": processes}
    usual = project.train(out="usual", train=train, **settings)
    recomputed = project.train(out="recomputed", train={**train, "activation_checkpointing": "blocks"}, **settings)
    assert losses(usual) == losses(recomputed)
    before, after = weights(usual), weights(recomputed)
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.long
def test_a_resume_may_take_it_up(project: Project) -> None:
    settings: dict[str, Any] = {
        "task": STACKED,
        "processes": 2,
        "checkpoint": {"every": "3 steps", "keep": {"last": 5}},
    }
    whole = project.train(out="whole", train={"steps": 6, "batch_size": 24}, **settings)
    run = project.train(out="run", train={"steps": 3, "batch_size": 24}, **settings)
    finished = project.run(
        "resume", str(run), "--set", "train.steps=6", "--set", "train.activation_checkpointing=blocks"
    )
    assert finished.code == 0, finished.text
    assert losses(run) == losses(whole)
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(whole).items())


def test_a_pattern_that_names_nothing_ends_the_run_before_the_first_step(project: Project) -> None:
    config = project.config(task=STACKED, processes=2, train={"steps": 2, "activation_checkpointing": "layers.*"})
    finished = project.run("train", config)
    assert finished.code == 2, finished.text
    assert (
        "train.activation_checkpointing: layers.*: no module of the model has a name like that; the nearest are "
        in finished.err
    )


@needs_compiler
@pytest.mark.long
def test_compiled_blocks_under_ddp_recomputed(project: Project) -> None:
    # Blocks that are larger than a bucket of gradients: torch's own way of compiling under DDP would cut them.
    task = {"type": f"{TASK_FILE}:Stacked", "layers": 4, "width": 600}
    settings: dict[str, Any] = {"task": task, "processes": 2, "strategy": {"type": "ddp", "bucket_mb": 1}}
    train = {"steps": 4, "batch_size": 12}
    usual = project.train(out="usual", train=train, **settings)
    run = project.train(
        out="blocks", train={**train, "activation_checkpointing": "blocks", "compile": "blocks"}, **settings
    )
    assert losses(run) == pytest.approx(losses(usual), rel=1e-4)
    assert list(weights(run)) == list(weights(usual))


def test_the_large_example_loads(project: Project) -> None:
    here = ["--set", "processes=2", "--set", "runtime=cpu"]
    finished = project.run("train", ROOT / "examples" / "gpt-1.3b.yaml", "--dry-run", *here)
    assert finished.code == 0, finished.text
    assert "activation_checkpointing: blocks" in finished.out and "compile: blocks" in finished.out
