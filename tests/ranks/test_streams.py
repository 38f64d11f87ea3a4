"""Streams on several ranks: the same answer as by index, every example once, and gone on with where they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stream_bodies
import torch
import torch.nn.functional as F

import lockstep
from conftest import ROOT, Project, last_weights, losses, rows, summary
from stream_tasks import SHARDS, write_shards
from tasks import Tiny

TASK = f"{ROOT / 'tests' / 'stream_tasks.py'}:Streamed"
IN_ORDER: dict[str, Any] = {"data": {"shuffle": False}}
launch = partial(lockstep.launch, runtime="cpu")


def task(kind: str, project: Project, **rest: Any) -> dict[str, Any]:
    folder = write_shards(project.folder / "shards")
    return {"type": TASK, "kind": kind, "folder": folder, **rest}


def validated(run: Path) -> list[float]:
    return [row["val/loss"] for row in rows(run) if "val/loss" in row]


def assert_same_end(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    found, expected = last_weights(run), last_weights(reference)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]
)
def test_a_stream_read_in_order_is_what_it_is_by_index(project: Project, processes: int) -> None:
    """Bit for bit: with an uneven last batch, and in micro-batches."""
    how: dict[str, Any] = {"processes": processes, "train": {"epochs": 2, "batch_size": 12, "accumulate": 2}}
    by_index = project.train(out="index", task=task("by index", project), **how, **IN_ORDER)
    streamed = project.train(out="stream", task=task("plain", project), **how, **IN_ORDER)
    assert len(losses(streamed)) == 14
    assert_same_end(streamed, by_index)


@pytest.mark.parametrize("kind", ["tar", pytest.param("hugging face", marks=pytest.mark.long)])
def test_ranks_that_run_out_at_different_times_are_weighed_by_what_is_there(project: Project, kind: str) -> None:
    """With weights that stay as they are, the mean loss over an epoch is that over all examples, each counted once."""
    run = project.train(
        processes=3, task=task(kind, project), train={"epochs": 1, "batch_size": 12, "accumulate": 2}, data={},
        optimizer={"type": "torch.optim.SGD", "lr": 0.0},
    )  # fmt: skip
    tiny = Tiny(examples=sum(SHARDS))
    model, (inputs, labels) = tiny.model(), tiny.train_data().tensors  # type: ignore[attr-defined]
    model.load_state_dict(last_weights(run))
    expected = float(F.cross_entropy(model(inputs), labels).detach())
    assert validated(run) == pytest.approx([expected], rel=1e-5)
    assert summary(run)["metrics"]["train/epoch_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("tar", 2),
        ("loader", 0),
        pytest.param("stateful", 1, marks=pytest.mark.long),
        pytest.param("plain", 2, marks=pytest.mark.long),
        pytest.param("hugging face", 0, marks=pytest.mark.long),
    ],
)
def test_sigkill_in_the_midst_of_a_stream(project: Project, kind: str, workers: int) -> None:
    """One rank is killed by the system, and the run goes on from its newest checkpoint, in the midst of the epoch."""
    buffer = {"shuffle_buffer": 5} if kind != "plain" else {}
    how: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 12},
        "data": {"workers": workers, **buffer},
        "checkpoint": {"every": "2 steps"},
    }
    hard = {"noise": kind in ("stateful", "plain"), "dropout": 0.3}
    reference = project.train(out="reference", task=task(kind, project, **hard), **how)
    fault = {"rank": 1, "step": 6, "how": "kill", "once": str(project.folder / "once")}
    again: dict[str, Any] = {"launch": {"max_restarts": 1}}
    run = project.train(out="killed", task=task(kind, project, fail_at=fault, **hard), **again, **how)
    assert (project.folder / "once").exists()
    assert "restored step-00000004" in (run / "logs" / "rank-0.log").read_text()
    assert_same_end(run, reference)
    assert validated(run) == validated(reference)


def test_a_pass_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Every remaining example once, whatever the number of ranks it was begun with."""
    shards = write_shards(tmp_path / "shards")
    begun = launch(partial(stream_bodies.walk, folder=shards, stop=2), processes=3, folder=tmp_path / "run")
    rest = launch(partial(stream_bodies.walk, folder=shards), processes=2, folder=tmp_path / "run")
    found = [number for part in (begun, rest) for rank in part for number in rank]
    assert sorted(found) == list(range(sum(SHARDS)))
    assert len([number for rank in begun for number in rank]) == 24
    assert "4 of 4 shards are left, 3 of them begun" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


def test_ranks_exchange_counts_for_many_batches_at_once() -> None:
    """And learn at the control sync that a hook stops the run: nothing is exchanged for every step."""
    one, two = launch(stream_bodies.exchanges, processes=2)
    sizes = stream_bodies.Numbers.sizes
    expected = [1000.0 * shard + number for shard, size in enumerate(sizes) for number in range(size)]
    assert sorted(one.pop("seen") + two.pop("seen")) == expected
    assert one == two
    assert one["steps"] >= 100 and one["end"] >= 210
    assert one["counts"] < one["end"] / 2 and one["stateless"] < 30 and one["asked"] == 0
    assert one["why"] == "enough (callback Enough) on rank 1"


def test_ranks_that_compute_the_same_share_read_the_same(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards")
    mesh = {"type": "tensor", "mesh": {"data": 1, "model": 2}, "shard": {"weight": ["model", None]}}
    one, two = launch(partial(stream_bodies.walk, folder=shards, stop=2), processes=2, folder=tmp_path, strategy=mesh)
    assert one == two and len(one) == 24


def test_a_stream_that_divides_itself_is_told_to_say_so(project: Project) -> None:
    finished = project.run("train", project.config(task=task("by rank", project), **IN_ORDER))
    assert finished.code == 2
    assert "the first batch of rank 1 is not that of rank 0" in finished.err and "is_share = True" in finished.err
