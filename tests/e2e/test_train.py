"""`lockstep train` as a user runs it: what it prints, what it leaves behind, how it validates and stops."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from safetensors import safe_open

from conftest import TASK_FILE, Project, losses, rows, steps_saved, summary

TINY = f"{TASK_FILE}:Tiny"


@pytest.mark.requirement("D01")
@pytest.mark.requirement("D05")
@pytest.mark.requirement("D08")
@pytest.mark.requirement("D09")
def test_a_run_and_its_folder(project: Project) -> None:
    finished = project.run("train", project.config(log={"every": "5 steps", "tensorboard": True}))
    assert finished.code == 0, finished.text
    run = project.only_run()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", run.name)
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "checkpoints", "code", "config.yaml", "lags.jsonl", "live.json", "logs", "metrics.jsonl", "report.html",
        "summary.json", "tensorboard", "timeline.jsonl", "topology.json",
    }  # fmt: skip
    end = summary(run)
    assert {"status", "epoch", "step", "world_size", "runtime", "strategy", "metrics", "best", "seconds",
            "samples_per_second"} <= end.keys()  # fmt: skip
    assert (end["status"], end["epoch"], end["step"]) == ("completed", 2, 14)
    assert (end["world_size"], end["runtime"], end["strategy"]) == (2, "cpu", "ddp")
    assert {"train/epoch_loss", "val/loss", "val/accuracy"} <= end["metrics"].keys()
    # The epoch is there from the first row on, and validation comes after the training of its epoch.
    assert [(row["epoch"], row["step"], "val/loss" in row) for row in rows(run)] == [
        (0, 5, False), (1, 7, True), (1, 10, False), (2, 14, True), (2, 14, False),
    ]  # fmt: skip
    # Rank 0 alone reports validation; every line says whose it is.
    zero, one = ((run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert "val/loss" in zero and "val/loss" not in one
    assert all("[RANK 0]" in line for line in zero.splitlines())
    assert all("[RANK 1]" in line for line in one.splitlines())
    # Rank 0 alone writes to the console: with the time, without its rank, and without a table of one host's devices.
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in finished.out.splitlines())
    assert "[RANK" not in finished.out and "physical device" not in finished.out
    assert "physical device" in zero and zero.count("examples/s") == 3
    assert [re.findall(r"step (\d+)/", line)[0] for line in finished.out.splitlines() if "examples/s" in line] == [
        "5",
        "14",
    ]
    # What to do next, and where everything is.
    assert "run folder: runs/" in finished.err and "lockstep resume" in finished.err
    assert "2 processes on cpu, 1 thread each" in finished.err
    topology = json.loads((run / "topology.json").read_text())
    assert [each["rank"] for each in topology["ranks"]] == [0, 1]
    assert len({each["physical_device"] for each in topology["ranks"]}) == 2


def test_the_model_file_opens_with_plain_safetensors(project: Project) -> None:
    run = project.train()
    checkpoint = max((run / "checkpoints").glob("step-*"))
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "5.bias"}
    assert {path.name for path in checkpoint.iterdir()} == {
        "manifest.json", "model.safetensors", "state.json", "state.safetensors",
    }  # fmt: skip


@pytest.mark.requirement("D04")
@pytest.mark.requirement("D07")
@pytest.mark.parametrize("on", ["rank0", "all"])
def test_validation_on_rank_0_or_on_all(project: Project, on: str) -> None:
    # Batch norm has buffers: validating through the wrapper, on one rank only, would wait for ever.
    run = project.train(validate={"on": on}, task={"type": TINY, "batch_norm": True}, timeouts={"collective": 20})
    assert [row["epoch"] for row in rows(run) if "val/loss" in row] == [1, 2]


@pytest.mark.requirement("D15")
@pytest.mark.requirement("D05")
def test_early_stopping_ends_all_ranks_and_is_remembered(project: Project) -> None:
    stop = {
        "criteria": [{"metric": "val/loss", "delta": 10.0}, {"metric": "val/accuracy", "mode": "max", "delta": 10.0}],
        "combine": "all",
        "patience": 2,
    }
    values = {"early_stop": stop, "train": {"epochs": 50, "batch_size": 12}}
    finished = project.run("train", project.config(**values))
    assert finished.code == 0, finished.text
    run = project.only_run()
    end = summary(run)
    assert (end["status"], end["epoch"]) == ("stopped early", 3)
    assert "no improvement of val/loss" in end["reason"] and "val/accuracy" in end["reason"]
    state = json.loads((max((run / "checkpoints").glob("step-*")) / "state.json").read_text())
    assert state["state"]["attached"]["validation"]["early_stopping"]["stale"] == [2, 2]
    # Interrupted after the first epoch and resumed, it stops at the same point.
    first = project.train(out="first", **{**values, "train": {"epochs": 2, "batch_size": 12}})
    resumed = project.run("resume", first, "--set", "train.epochs=50")
    assert resumed.code == 0, resumed.text
    assert summary(first)["epoch"] == 3


def test_a_metric_that_will_never_be_there_is_told_before_any_rank_starts(project: Project) -> None:
    """And not after the first epoch, with nothing saved, nor as the failure of a rank."""
    mistake = {"checkpoint": {"keep": {"metric": "val/acuracy", "mode": "max"}}}
    finished = project.run("train", project.config(processes=2, **mistake))
    assert finished.code == 2, finished.text
    told = "lockstep: checkpoint.keep.metric: there is no metric 'val/acuracy': did you mean val/accuracy?"
    assert finished.err.startswith(told) and "rank" not in finished.text
    assert not (project.folder / "runs").exists(), "no folder of a run that never was"


@pytest.mark.requirement("D06")
def test_without_validation_data_training_metrics_decide(project: Project) -> None:
    run = project.train(
        data={}, early_stop={"criteria": [{"delta": 10.0}], "patience": 1}, train={"epochs": 9, "batch_size": 12}
    )
    end = summary(run)
    assert (end["status"], end["epoch"]) == ("stopped early", 2)
    assert not any("val/loss" in row for row in rows(run))
    assert end["best"]["metric"] == "train/epoch_loss"


@pytest.mark.requirement("D16")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_scheduler_is_stepped_under_every_strategy(project: Project, processes: int) -> None:
    scheduler = {"type": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5, "every": "1 step"}
    run = project.train(processes=processes, scheduler=scheduler, train={"steps": 6, "batch_size": 12})
    rates = [row["lr"] for row in rows(run) if "lr" in row]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert summary(run)["strategy"] == ("single" if processes == 1 else "ddp")


@pytest.mark.requirement("D16")
def test_a_scheduler_that_watches_a_metric(project: Project) -> None:
    scheduler = {
        "type": "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "monitor": "val/loss",
        "patience": 0,
        "threshold": 100.0,
    }
    run = project.train(scheduler=scheduler, train={"epochs": 4, "batch_size": 12})
    assert [row["lr"] for row in rows(run) if "lr" in row][-1] == pytest.approx(0.1 * 0.1**3)


@pytest.mark.requirement("D16")
def test_a_scheduler_that_watches_a_metric_waits_for_the_first_validation(project: Project) -> None:
    scheduler = {
        "type": "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "monitor": "val/loss",
        "patience": 0,
        "threshold": 100.0,
        "every": "1 step",
    }
    run = project.train(scheduler=scheduler, train={"steps": 5, "batch_size": 12}, validation={"every": "3 steps"})
    rates = [row["lr"] for row in rows(run) if "lr" in row]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.001]), "the validation after step 3 is the first to go by"
    assert "val/loss comes with the first validation" in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.requirement("D17")
def test_every_knob_of_the_data_works(project: Project) -> None:
    data = {"workers": 2, "prefetch": 3, "pin_memory": True, "drop_last": True, "shuffle": False,
            "persistent_workers": True, "split": {"train": 0.7, "val": 0.2, "test": 0.1}}  # fmt: skip
    run = project.train(data=data, seed=3)
    assert list(losses(run)) == list(range(1, 11)), "70 examples are 5 full batches of 12, twice"
    assert "test/loss" in summary(run)["metrics"]
    assert [row for row in rows(run) if "test/accuracy" in row]


def test_checkpoints_are_kept_by_number_and_by_value(project: Project) -> None:
    run = project.train(
        checkpoint={"every": "1 epoch", "keep": {"last": 2, "best": 1}}, train={"epochs": 6, "batch_size": 12}
    )
    best = summary(run)["best"]
    assert set(steps_saved(run)) == {35, 42, best["step"]}


def test_bf16_is_applied(project: Project) -> None:
    run = project.train(processes=1, train={"epochs": 1, "batch_size": 12, "precision": "bf16"})
    exact = project.train(out="exact", processes=1, train={"epochs": 1, "batch_size": 12})
    difference = [abs(one - losses(exact)[step]) for step, one in losses(run).items()]
    assert 0 < max(difference) < 0.05


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_computes_the_same_and_saves_the_same_names(project: Project) -> None:
    run = project.train(processes=1, train={"steps": 3, "batch_size": 12, "compile": True})
    eager = project.train(out="eager", processes=1, train={"steps": 3, "batch_size": 12})
    assert losses(run) == pytest.approx(losses(eager), rel=1e-5)
    names = [
        path.read_bytes()[8:200].split(b'"')[1::2]
        for path in (max(each.glob("checkpoints/*/model.safetensors")) for each in (run, eager))
    ]
    assert names[0] == names[1]


def test_dry_run_prints_the_config_and_the_plan_and_starts_nothing(project: Project) -> None:
    finished = project.run(
        "train",
        project.config(),
        "--dry-run",
        "--set",
        "data.split={train: 0.9, val: 0.1}",
        "--set",
        "launch.port=29512",
    )
    assert finished.code == 0, finished.text
    config, _, plan = finished.out.partition("\n\n")
    assert yaml.safe_load(config)["data"]["split"] == {"train": 0.9, "val": 0.1, "test": 0.0}
    lines = plan.strip().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f"RANK={rank} " in line and "MASTER_PORT=29512" in line and "-m lockstep.worker RUN_DIR" in line
    assert not (project.folder / "runs").exists()


@pytest.mark.long
@pytest.mark.requirement("D11")
def test_lockstep_train_under_torchrun(project: Project) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep"]
    finished = subprocess.run(
        [*command, "train", str(project.config()), "--out", "under"],
        cwd=project.folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    run = project.only_run("under")
    same = project.train(out="ours")
    assert losses(run) == losses(same)
    assert summary(run)["world_size"] == 2


def test_init_writes_something_that_trains(project: Project) -> None:
    assert project.run("init", "start").code == 0
    finished = project.run("train", "start/config.yaml", "--set", "train.epochs=12", "--out", "runs")
    assert finished.code == 0, finished.text
    assert summary(project.only_run())["metrics"]["val/accuracy"] > 0.85
    again = project.run("init", "start")
    assert again.code == 2 and "is there already" in again.err


"""


def test_a_missing_run(project: Project) -> None:
    resumed = project.run("resume", "nowhere")
    assert resumed.code == 2 and "there is no such folder" in resumed.err
    empty = Path(project.folder / "empty")
    empty.mkdir()
    resumed = project.run("resume", "empty")
    assert resumed.code == 2 and "holds no config.yaml" in resumed.err


"""


@pytest.mark.requirement("D18")
def test_a_skipped_step_and_a_pruned_trial_are_the_same_on_all_ranks(project: Project) -> None:
    run = project.train(
        task={"type": f"{TASK_FILE}:Pruned", "fail_at": {"rank": 1, "step": 3, "how": "nan"}},
        train={"epochs": 9, "batch_size": 12, "on_nan": "skip"},
    )
    assert [row["step"] for row in rows(run) if "skipped_steps" in row] == [3]
    assert all(math.isfinite(loss) for loss in losses(run).values())
    end = summary(run)
    assert (end["status"], end["reason"], end["epoch"]) == ("stopped early", "pruned", 2)
