"""The mathematics of a run does not depend on how many processes it has, nor on where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import TASK_FILE, Project, losses, rows, summary

TINY = f"{TASK_FILE}:Tiny"


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


@pytest.mark.requirement("D14")
@pytest.mark.requirement("D10")
def test_one_to_four_processes_give_the_same_losses_step_by_step(project: Project) -> None:
    # 80 training examples in batches of 12: the last batch has 8, so it is uneven over 3 ranks.
    settings: dict[str, Any] = {"train": {"epochs": 3, "batch_size": 12}, "task": {"type": f"{TASK_FILE}:Augmented"}}
    split = {"train": 0.8, "val": 0.2}
    data = {n: {"split": split, "workers": 2 if n == 3 else 0} for n in (1, 2, 3, 4)}
    runs = {n: project.train(out=f"on-{n}", processes=n, data=data[n], **settings) for n in data}
    reference = losses(runs[1])
    assert len(reference) == 21
    for run in runs.values():
        assert largest_difference(reference, losses(run)) < 1e-5
    validated = {n: [row["val/loss"] for row in rows(run) if "val/loss" in row] for n, run in runs.items()}
    for n in (2, 3, 4):
        assert validated[n] == pytest.approx(validated[1], rel=1e-5)
    assert {n: summary(run)["world_size"] for n, run in runs.items()} == {1: 1, 2: 2, 3: 3, 4: 4}


def test_fewer_examples_in_the_last_batch_than_ranks(project: Project) -> None:
    """80 training examples in batches of 13 x 3 = 39: the last batch has two, and one of three ranks has none."""
    settings: dict[str, Any] = {"train": {"epochs": 2, "batch_size": 39}}
    alone = project.train(out="one", processes=1, **settings)
    three = project.train(out="three", processes=3, **settings)
    assert largest_difference(losses(alone), losses(three)) < 1e-5


def test_accumulation_and_clipping_change_no_number_that_matters(project: Project) -> None:
    train = {"epochs": 2, "batch_size": 12, "clip_norm": 0.5}
    whole = project.train(out="whole", processes=1, train=train)
    parts = project.train(out="parts", processes=2, train={**train, "accumulate": 3})
    assert largest_difference(losses(whole), losses(parts)) < 1e-5


def test_one_rank_and_all_ranks_measure_the_same(project: Project) -> None:
    everywhere = project.train(out="all", validate={"on": "all"}, task={"type": TINY, "batch_norm": True})
    alone = project.train(out="rank0", validate={"on": "rank0"}, task={"type": TINY, "batch_norm": True})
    for one, other in zip(rows(everywhere), rows(alone), strict=True):
        names = [name for name in one if name.startswith("val/")]
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-6)


def test_validation_counts_every_example_once(project: Project) -> None:
    """Of 20 validation examples each counts one twentieth: an accuracy with any other denominator is wrong."""
    run = project.train(processes=3, validate={"batch_size": 7})
    for row in rows(run):
        if "val/accuracy" in row:
            assert row["val/accuracy"] * 20 == pytest.approx(round(row["val/accuracy"] * 20), abs=1e-9)


def recorded(prefix: Path, world_size: int) -> list[list[int]]:
    """The global batches that were trained on, put together from what each rank saw."""
    ranks = [Path(f"{prefix}-{rank}").read_text().splitlines() for rank in range(world_size)]
    assert len({len(lines) for lines in ranks}) == 1, "every rank takes part in every step"
    return [[int(word) for lines in ranks for word in lines[step].split()] for step in range(len(ranks[0]))]


def test_resumed_on_another_world_size_it_sees_every_remaining_example_once(project: Project) -> None:
    def settings(n: int, **train: int) -> dict[str, Any]:
        return {
            "processes": n,
            "train": {"batch_size": 12, **train},
            "task": {"type": f"{TASK_FILE}:Recording", "record": str(project.folder / "seen")},
        }

    run = project.train(**settings(3, steps=4))
    first = recorded(project.folder / "seen", 3)
    for rank in range(3):
        (project.folder / f"seen-{rank}").unlink()
    finished = project.run("resume", run, "--set", "processes=2", "--set", "train={batch_size: 12, epochs: 2}")
    assert finished.code == 0, finished.text
    assert "changed: processes: 3 -> 2" in finished.err
    rest = recorded(project.folder / "seen", 2)
    epoch_one = [number for batch in first + rest[:3] for number in batch]
    epoch_two = [number for batch in rest[3:] for number in batch]
    assert len(epoch_one) == len(epoch_two) == 80
    assert sorted(epoch_one) == sorted(set(epoch_one)) == sorted(epoch_two)
    assert epoch_one != epoch_two, "every epoch has its own order"


def test_resume_to_more_epochs_equals_a_run_that_had_them_from_the_start(project: Project) -> None:
    long = project.train(out="long", train={"epochs": 4, "batch_size": 12}, task={"type": TINY, "dropout": 0.2})
    short = project.train(out="short", train={"epochs": 2, "batch_size": 12}, task={"type": TINY, "dropout": 0.2})
    finished = project.run("resume", short, "--set", "train.epochs=4")
    assert finished.code == 0, finished.text
    assert losses(short) == losses(long)
    assert weights(short).keys() == weights(long).keys()
    assert all(torch.equal(weights(short)[name], tensor) for name, tensor in weights(long).items())
    assert summary(short)["metrics"] == summary(long)["metrics"]


def test_tied_weights_are_saved_once_and_restored_tied(project: Project) -> None:
    run = project.train(task={"type": TINY, "tied": True}, train={"epochs": 1, "batch_size": 12})
    assert "4.weight" not in weights(run)
    finished = project.run("resume", run, "--set", "train.epochs=2")
    assert finished.code == 0, finished.text
    state = json.loads((max((run / "checkpoints").glob("step-*")) / "state.json").read_text())
    assert state["shared"] == {"4.weight": "3.weight"}
