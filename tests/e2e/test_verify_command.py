"""`lockstep verify` as a user runs it: real processes, real checkpoints, and results that really are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TASK_FILE, Project

DIGITS = ROOT / "examples" / "digits.yaml"
TWO_RANKS = ("--only", "cpu-ddp-2", "--steps", "2")
LIMIT = 300.0  # several runs


def by_name(out: str) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(out)["combinations"]}


@pytest.mark.long
@pytest.mark.requirement("D14")
def test_digits_agrees_under_both_launchers_and_from_each_others_checkpoints(project: Project) -> None:
    wanted = [f"--require={name}" for name in ("cpu-ddp-2", "cpu-torchrun-2")]
    finished = project.run("verify", DIGITS, "--only", "xla-single", *wanted, "--json", limit=LIMIT)
    assert finished.code == 0, finished.text
    found = by_name(finished.out)
    assert [each["verdict"] for each in found.values()][:3] == ["reference", "agrees", "agrees"]
    assert [each["resumed"]["resumed_from"] for each in found.values() if each["resumed"]][:3] == [
        "xla-single" if "xla-single" in found else "cpu-torchrun-2",
        "cpu-single",
        "cpu-ddp-2",
    ]
    for each in found.values():
        assert list(each["losses"]) == ["1", "2", "3", "4", "5"]
        assert list(each["resumed"]["losses"]) == ["4", "5"] and each["resumed"]["verdict"] == "agrees"
    # Different sums of the same numbers: not equal bit for bit, or the comparison compared a run with itself.
    assert 0 < found["cpu-ddp-2"]["largest_difference"] < 1e-6
    assert found["cpu-ddp-2"]["losses"] == found["cpu-torchrun-2"]["losses"]
    assert {path.name for path in project.folder.iterdir()} == {".stdout", ".stderr"}


def test_a_loss_that_depends_on_the_number_of_ranks_is_caught_at_step_1(project: Project) -> None:
    config = project.config(task={"type": f"{TASK_FILE}:SummedLoss", "batch_norm": True})
    finished = project.run("verify", config, *TWO_RANKS, "--out", "kept", limit=LIMIT)
    assert finished.code == 1, finished.text
    assert "cpu-ddp-2 differs at step 1: equal weights and an equal batch give another loss" in finished.out
    assert "4 normalise by the statistics of a rank's part of the batch" in finished.out
    assert (project.folder / "kept" / "cpu-ddp-2" / "output.log").is_file()


@pytest.mark.long
def test_a_wrong_reduction_is_caught_after_the_first_update(project: Project) -> None:
    config = project.config(task={"type": f"{TASK_FILE}:WrongReduction"})
    finished = project.run("verify", config, *TWO_RANKS, "--no-resume", "--out", "kept", "--json", limit=LIMIT)
    assert finished.code == 1, finished.text
    found = by_name(finished.out)["cpu-ddp-2"]
    assert (found["verdict"], found["differs_from_step"]) == ("differs", 2)
    assert found["largest_difference"] > 1e-4, "far outside of what rounding does"
    assert json.loads(finished.out)["control_difference"] < 1e-6
    assert "rounding is not the reason" in finished.out


def test_dropout_is_told_from_a_mistake(project: Project) -> None:
    config = project.config(task={"type": f"{TASK_FILE}:Tiny", "dropout": 0.2})
    finished = project.run("verify", config, *TWO_RANKS, "--out", "kept", limit=LIMIT)
    assert finished.code == 1, finished.text
    assert "the task draws random numbers while it trains" in finished.out
    assert "compare without them: --set task.dropout=0" in finished.out
    assert "cpu-ddp-2    random" in finished.out
    assert finished.out.endswith("\nnot comparable: random\n") and "do not agree" not in finished.out


def test_with_exact_dropout_is_judged_in_every_bit(project: Project) -> None:
    config = project.config(task={"type": f"{TASK_FILE}:Tiny", "dropout": 0.2})
    finished = project.run("verify", config, "--only", "exact-[12]", "--steps", "2", "--out", "kept", limit=LIMIT)
    assert finished.code == 0, finished.text
    assert "2 with train.exact have the same bits, on any number of ranks" in finished.out


def test_a_mean_over_tokens_is_named_with_the_line_that_mends_it(project: Project) -> None:
    """As `model(**batch).loss` of Hugging Face is: a mean over the labels that are not -100."""
    config = project.config(task={"type": f"{TASK_FILE}:TokenMean"})
    finished = project.run(
        "verify", config, "--only", "cpu-ddp-2", "--steps", "3", "--no-resume", "--out", "kept", limit=LIMIT
    )
    assert finished.code == 1 and "the loss is a mean over unequal counts" in finished.out, finished.text
    mended = project.config(task={"type": f"{TASK_FILE}:TokenMean", "mended": True})
    finished = project.run("verify", mended, "--only", "cpu-ddp-2", "--steps", "3", "--no-resume", limit=LIMIT)
    assert finished.code == 0, finished.text


@pytest.mark.long
def test_random_augmentation_agrees_on_any_number_of_processes_and_workers(project: Project) -> None:
    config = project.config(task={"type": f"{TASK_FILE}:Augmented"})
    losses = []
    for workers, wanted in [(0, ["cpu-ddp-2", "cpu-fsdp-3"]), (2, ["cpu-ddp-2"])]:
        required = [f"--require={name}" for name in wanted]
        few = ("--only", "cpu-single", "--steps", "2", f"--set=data.workers={workers}", "--no-resume", "--json")
        finished = project.run("verify", config, *required, *few, limit=LIMIT)
        assert finished.code == 0, finished.text
        found = by_name(finished.out)
        assert [each["verdict"] for each in found.values()] == ["reference", *["agrees" for _ in wanted]]
        losses.append(found["cpu-single"]["losses"])
    assert losses[0] == losses[1]


@pytest.mark.long
def test_a_combination_that_fails_shows_its_headline_and_its_log(project: Project) -> None:
    fails = {"rank": 1, "step": 2, "how": "exception"}
    config = project.config(task={"type": f"{TASK_FILE}:Tiny", "fail_at": fails})
    finished = project.run("verify", config, *TWO_RANKS, limit=LIMIT)
    assert finished.code == 1, finished.text
    (line,) = (line for line in finished.out.splitlines() if line.startswith("cpu-ddp-2 failed"))
    assert "rank 1 of 2 on " in line and "failed: ValueError: this example cannot be right; log: " in line
    log = Path(line.split("log: ")[1])
    assert "Traceback" in log.read_text()
    shutil.rmtree(log.parents[1])  # the runs are kept for whoever wants to look


SMALL_GPT = (
    ROOT / "examples" / "gpt.yaml", "--set=task.width=16", "--set=task.heads=2", "--set=task.max_bytes=20000",
    "--set=train.batch_size=8", "--steps=2", "--json",
)  # fmt: skip


def test_sequences_are_split_where_the_blocks_of_a_model_can_be(project: Project) -> None:
    only = ("--require=cpu-context-2*", "--only=cpu-single", "--set=task.context=16")
    finished = project.run("verify", *SMALL_GPT, *only, limit=LIMIT)
    assert finished.code == 0, finished.text
    found = by_name(finished.out)
    assert list(found) == ["cpu-single", "cpu-context-2", "cpu-context-2x2"]
    assert {each["resumed"]["verdict"] for each in found.values()} == {"agrees"}
    assert found["cpu-context-2"]["largest_difference"] < 1e-6


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((DIGITS, "--steps=2", "--json"), "sequences are split within one stack of blocks"),
        pytest.param(
            (*SMALL_GPT, "--set=task.context=15"), "sequences of 15 tokens cannot be divided", marks=pytest.mark.long
        ),
    ],
)
def test_a_task_whose_sequences_cannot_be_split_is_named_with_the_reason(
    command: Any, message: str, project: Project
) -> None:
    only = ("--only=cpu-fsdp-2", "--only=cpu-context-2", "--no-resume")
    finished = project.run("verify", *command, *only, limit=LIMIT)
    assert finished.code == 0, finished.text
    assert list(by_name(finished.out)) == ["cpu-single", "cpu-fsdp-2"]
    assert message in json.loads(finished.out)["not_here"]["cpu-context-2"]
