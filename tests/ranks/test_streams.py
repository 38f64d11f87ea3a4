"""Streams on several ranks: the same answer as by index, every example once, and gone on with where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT, Project, last_weights, losses, rows, steps_saved, summary
from stream_tasks import SHARDS, write_shards

TASK = f"{ROOT / 'tests' / 'stream_tasks.py'}:Streamed"
IN_ORDER: dict[str, Any] = {"data": {"shuffle": False}}


def task(kind: str, project: Project, **rest: Any) -> dict[str, Any]:
    folder = write_shards(project.folder / "shards")
    return {"type": TASK, "kind": kind, "folder": folder, **rest}


def validated(run: Path) -> list[float]:
    return [row["val/loss"] for row in rows(run) if "val/loss" in row]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_stream_read_in_order_is_what_it_is_by_index(project: Project, processes: int) -> None:
    """Bit for bit: with the last batch uneven, and micro-batches, some without an example."""
    how: dict[str, Any] = {"processes": processes, "train": {"epochs": 2, "batch_size": 12, "accumulate": 2}}
    by_index = project.train(out="index", task=task("by index", project), **how, **IN_ORDER)
    streamed = project.train(out="stream", task=task("plain", project), **how, **IN_ORDER)
    assert losses(streamed) == losses(by_index) and len(losses(streamed)) == 14
    found, expected = last_weights(streamed), last_weights(by_index)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["tar", "hugging face"])
def test_ranks_that_run_out_at_different_times_are_weighed_by_what_is_there(project: Project, kind: str) -> None:
    """Without momentum and with a loss of one parameter it would be a sum; here it is enough that each example counts
    once: validation over the shards is that by index, on any number of ranks."""
    runs = {
        count: project.train(out=f"on-{count}", processes=count, task=task(kind, project), optimizer={
            "type": "torch.optim.SGD", "lr": 0.0
        }, train={"epochs": 1, "batch_size": 12}, **IN_ORDER)
        for count in (1, 2)
    }  # fmt: skip
    by_index = project.train(
        out="index", processes=1, task=task("by index", project), train={"epochs": 1, "batch_size": 12},
        optimizer={"type": "torch.optim.SGD", "lr": 0.0}, **IN_ORDER,
    )  # fmt: skip
    for run in runs.values():
        assert validated(run) == pytest.approx(validated(by_index), rel=1e-6)
        assert summary(run)["metrics"]["train/loss"] == pytest.approx(summary(by_index)["metrics"]["train/loss"], rel=1e-6)
        assert sum(row["examples"] for row in rows(run)[-1:] if "examples" in row) in (0, sum(SHARDS))


@pytest.mark.parametrize(
    ("kind", "workers", "processes"),
    [("stateful", 0, 2), ("plain", 1, 2), ("tar", 2, 2), ("hugging face", 0, 2), ("loader", 0, 2)],
)
def test_sigkill_in_the_midst_of_a_stream(project: Project, kind: str, workers: int, processes: int) -> None:
    how: dict[str, Any] = {
        "processes": processes,
        "train": {"epochs": 2, "batch_size": 12},
        "data": {"workers": workers, **({"shuffle_buffer": 5} if kind != "plain" else {})},
        "checkpoint": {"every": "2 steps"},
    }
    noise = {"noise": kind in ("stateful", "plain"), "dropout": 0.3}
    reference = project.train(out="reference", task=task(kind, project, **noise), **how)
    fault = {"rank": 1, "step": 6, "how": "kill", "once": str(project.folder / "once")}
    config = project.config(**{"task": task(kind, project, fail_at=fault, **noise), **how, "data": how["data"]})
    assert project.run("train", config, "--out", "killed").code == 5
    run = project.only_run("killed")
    assert 0 < max(steps_saved(run)) < 6
    resumed = project.run("resume", run)
    assert resumed.code == 0, resumed.text
    assert losses(run) == losses(reference)
    assert validated(run) == validated(reference)
    found, expected = last_weights(run), last_weights(reference)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
