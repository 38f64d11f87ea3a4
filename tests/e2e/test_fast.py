"""`lockstep train --fast`, and runs on parts of the data: --overfit, --limit-train, --limit-val."""

from __future__ import annotations

import pytest
import yaml

from conftest import TASK_FILE, Project, losses, rows, steps_saved, summary

TINY = f"{TASK_FILE}:Tiny"


def test_fast_trains_saves_and_resumes_once(project: Project) -> None:
    """Where a long run would: with the schedule of the whole run, which a shorter limit would refuse."""
    config = project.config(train={"epochs": 50, "batch_size": 12}, scheduler={"type": "cosine", "warmup": 20},
                            data={"split": {"train": 0.6, "val": 0.2, "test": 0.2}})  # fmt: skip
    finished = project.run("train", config, "--fast")
    assert finished.code == 0, finished.text
    run = project.only_run()
    assert run.name.startswith("tiny-fast-") and str(run.relative_to(project.folder)) in finished.err
    assert "measured (val, test), saved, resumed at step 1, ended at step 2" in finished.err
    assert "on 2 processes" in finished.err and "restored step-00000001" in finished.text
    assert steps_saved(run) == [1, 2] and summary(run)["step"] == 2
    rates = [row["lr"] for row in rows(run) if "lr" in row and "train/loss" in row]
    assert rates == pytest.approx([0.1 / 20, 0.1 * 2 / 20]), "of the warm-up of the run that is tried"
    assert "validate.limit: 12 of 20 examples of val" in finished.text
    log = (run / "logs" / "rank-0.log").read_text()
    assert "model: Sequential, 484 parameters, 484 of them trained, float32, on cpu (ddp)" in log
    # A failure is one of the command, and names what failed; with restarts it would fail as often.
    broken = project.config(
        task={"type": TINY, "fail_at": {"step": 1, "rank": 0, "how": "exception"}}, launch={"max_restarts": 3}
    )
    failed = project.run("train", broken, "--fast", "--out", "broken")
    assert failed.code == 5 and "it works" not in failed.err, failed.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fast", "--set", "launch=slurm"], "--fast: with launch: slurm, this command cannot start a run twice"),
        (["--fast", "--pod", "there"], "--fast: with --pod"),
        (["--fast", "--out", "s3://bucket/runs"], "a bucket is not for throw-away runs"),
        (["--fast", "--set", "seed=1,2"], "--fast: a sweep has many runs"),
        (["--at-once", "2"], "--at-once 2: is for a sweep"),
        (["--overfit", "3", "--limit-train", "3"], "give limit or overfit, not both (limit: 3, overfit: 3)"),
        (["--set", "seed=1,2", "--set", "launch=slurm"], "not launch: slurm"),
        (["--set", "processes=1,2"], "all trials of a sweep run alike"),
    ],
)
def test_what_these_options_refuse(project: Project, options: list[str], message: str) -> None:
    finished = project.run("train", project.config(), *options)
    assert finished.code == 2 and message in finished.err, finished.text
    assert not (project.folder / "runs").exists()


def test_a_limit_of_training_data_is_of_examples_on_any_number_of_processes(project: Project) -> None:
    found = []
    for processes, strategy, where in ((1, "auto", "(single)"), (2, "fsdp", "split between ranks (fsdp)")):
        limits = ("--limit-train", "20", "--limit-val", "7")
        run = project.train(*limits, out=strategy, processes=processes, strategy=strategy)
        log = (run / "logs" / "rank-0.log").read_text()
        assert "model: Sequential, 484 parameters, 484 of them trained, float32, on cpu" in log and where in log
        assert (summary(run)["epoch"], summary(run)["step"]) == (2, 4), "20 examples are 2 batches of 12"
        settings = yaml.safe_load((run / "config.yaml").read_text())
        assert (settings["train"]["limit"], settings["validate"]["limit"]) == (20, 7)
        found.append((losses(run), summary(run)["metrics"]["val/loss"]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    changed = project.run("resume", run, "--set", "train.limit=30", "--set", "train.epochs=3")
    assert changed.code == 2 and "train.limit: 20 -> 30 (the position in the data" in changed.err


def test_overfit_validates_on_what_it_trains_on_in_a_fixed_order(project: Project) -> None:
    still = {"type": "torch.optim.SGD", "lr": 0.0}
    run = project.train("--overfit", "18", optimizer=still, processes=1)
    trained = losses(run)
    assert list(trained) == [1, 2, 3, 4]
    assert (trained[1], trained[2]) == (trained[3], trained[4]), "the same batches in both epochs"
    metrics = summary(run)["metrics"]
    assert metrics["val/loss"] == pytest.approx(metrics["train/epoch_loss"], rel=1e-6)
    assert metrics["val/loss"] == pytest.approx((12 * trained[1] + 6 * trained[2]) / 18, rel=1e-6)
    # Without validation data, too.
    run = project.train("--overfit", "12", out="none", data={}, processes=1)
    assert "val/accuracy" in summary(run)["metrics"]
