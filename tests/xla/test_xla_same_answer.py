"""One task file, one config: every strategy on XLA devices gives the losses that the CPU gives."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from xla_ways import needs_torch_xla, on_xla

from conftest import TASK_FILE, Project, losses, rows, summary

pytestmark = needs_torch_xla

TRAIN: dict[str, Any] = {"train": {"epochs": 2, "batch_size": 16, "clip_norm": 1.0}}  # 80 examples: all batches full
UNEVEN: dict[str, Any] = {"train": {"epochs": 2, "batch_size": 24}}  # the last batch has 8 of 24
RULES = {"0.weight": ["model", None], "3.weight": [None, "model"]}

WAYS: dict[str, dict[str, Any]] = {
    "single": on_xla("single"),
    "ddp-2": on_xla("ddp", processes=2),
    "threads-2": on_xla("threads", 2),
    "threads-4": on_xla("threads", 4),
    "threads-8": on_xla("threads", 8),
    "spmd-4": on_xla("spmd", 4),
    "spmd-2x2": on_xla({"type": "spmd", "mesh": {"data": -1, "model": 2}, "shard": RULES}, 4),
    "fsdp-4": on_xla("fsdp", 4),
}


def mostly_long(*short: Any, long: tuple[Any, ...]) -> list[Any]:
    """Cases, of which some say little that is not said by another."""
    return [*short, *(pytest.param(*_several(each), marks=pytest.mark.long) for each in long)]


def _several(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


@pytest.mark.requirement("X09")
@pytest.mark.requirement("X08")
@pytest.mark.requirement("X10")
@pytest.mark.requirement("P07")
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_validation_agree_with_the_cpu(project: Project, way: str) -> None:
    reference = project.train(out="cpu", **{**TRAIN, "processes": 1})
    run = project.train(out="xla", **{**TRAIN, **WAYS[way]})
    assert largest_difference(losses(reference), losses(run)) < 1e-5
    validated = [[row["val/loss"] for row in rows(each) if "val/loss" in row] for each in (reference, run)]
    assert validated[1] == pytest.approx(validated[0], rel=1e-5)
    measured = [summary(each)["metrics"]["val/accuracy"] for each in (reference, run)]
    assert measured[1] == pytest.approx(measured[0])
    assert summary(run)["runtime"] == "xla"


@pytest.mark.requirement("P06")
@pytest.mark.parametrize("way", mostly_long("threads-4", "spmd-4", long=("single", "ddp-2")))
def test_a_short_batch_is_filled_up_and_the_mean_stays_exact(project: Project, way: str) -> None:
    reference = project.train(out="cpu", **{**UNEVEN, "processes": 1})
    run = project.train(out="xla", **{**UNEVEN, **WAYS[way]})
    assert largest_difference(losses(reference), losses(run)) < 1e-5
    assert summary(run)["epoch"] == 2


# 80 examples in batches of 30, which neither 4 devices nor 2 processes divide in all cases; the last batch has 20.
@pytest.mark.parametrize(
    ("way", "task"),
    mostly_long(
        ("ddp-2", "TwoModels"), ("threads-4", "Padded"), ("spmd-4", "TwoModels"), ("fsdp-4", "Padded"),
        long=(("single", "Padded"), ("single", "TwoModels"), ("ddp-2", "Padded"), ("threads-4", "TwoModels"),
              ("spmd-4", "Padded"), ("fsdp-4", "TwoModels")),
    ),
)  # fmt: skip
def test_means_over_tokens_and_several_models_agree_with_the_cpu(project: Project, way: str, task: str) -> None:
    values: dict[str, Any] = {"train": {"epochs": 2, "batch_size": 30}, "task": {"type": f"{TASK_FILE}:{task}"}}
    if task == "TwoModels":
        values["optimizer"] = None
    reference = project.train(out="cpu", **{**values, "processes": 1})
    run = project.train(out="xla", **{**values, **WAYS[way]})
    assert largest_difference(losses(reference), losses(run)) < 1e-5
    for name in ("val/loss", "val/accuracy"):
        assert summary(run)["metrics"][name] == pytest.approx(summary(reference)["metrics"][name], rel=1e-5), name


@pytest.mark.requirement("P08")
@pytest.mark.parametrize("way", mostly_long("single", "spmd-2x2", long=("ddp-2", "threads-2")))
def test_the_step_is_compiled_in_its_first_steps_only(project: Project, way: str) -> None:
    """A line in the log at every step must not add to it, nor must more steps."""
    found = {}
    for epochs in (2, 4):
        train = {"epochs": epochs, "batch_size": 16}
        run = project.train(out=f"for-{epochs}", **{"train": train, **WAYS[way]})
        found[epochs] = summary(run)["compilations"]["a step"]
        assert "compiled anew" not in (run / "logs" / "rank-0.log").read_text()
    assert found[2] == found[4] <= 3 * max(1, WAYS[way]["devices"] if way.startswith("threads") else 1) + 2


def test_checkpoints_go_from_one_way_to_the_next(project: Project) -> None:
    """Each goes on where the one before was stopped; together they are the run that was never interrupted."""
    whole = project.train(out="whole", train={"steps": 8, "batch_size": 16}, processes=1)
    settings: dict[str, Any] = {"checkpoint": {"every": "2 steps"}}
    run = project.train(out="parts", **{**settings, "train": {"steps": 2, "batch_size": 16}, **WAYS["spmd-2x2"]})
    for steps, way in ((4, "threads-2"), (6, "ddp-2"), (8, "cpu")):
        values = WAYS.get(way, {"runtime": "cpu", "strategy": "auto", "devices": "auto", "processes": 1})
        sets = [f"train.steps={steps}", f"runtime={values['runtime']}", f"processes={values['processes']}"]
        sets += [f"devices={values['devices']}", "strategy={type: " + str(values["strategy"]) + "}"]
        arguments = [part for each in sets for part in ("--set", each)]
        finished = project.run("resume", str(run), *arguments)
        assert finished.code == 0, finished.text
    assert largest_difference(losses(whole), losses(run)) < 1e-5


def test_tied_weights_stay_tied(project: Project) -> None:
    task = {"type": f"{TASK_FILE}:Tiny", "tied": True}
    reference = project.train(out="cpu", **{**TRAIN, "processes": 1, "task": task})
    run = project.train(out="xla", **{**TRAIN, **WAYS["single"], "task": task})
    assert largest_difference(losses(reference), losses(run)) < 1e-5
    newest = max((run / "checkpoints").glob("step-*"))
    saved = load_file(newest / "model.safetensors")
    if "4.weight" in saved:
        assert saved["4.weight"].equal(saved["3.weight"])
