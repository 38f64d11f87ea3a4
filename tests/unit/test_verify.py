"""The comparison of `lockstep verify`: what counts as equal, what can run, and what is said about the rest."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.verify import report
from lockstep.verify.combinations import COMBINATIONS, REFERENCE, USUAL, Combination, halfway, missing, named, needed
from lockstep.verify.examine import draws_random_numbers
from lockstep.verify.report import Asked, Comparison, Judged, Report, Row, compare, metrics_apart, tolerance
from lockstep.verify.trial import RunPool, Trial, execute, headline

REFERENCE_LOSSES = {1: 2.0, 2: 1.0, 3: 0.5}


# Comparing


@pytest.mark.parametrize(
    ("losses", "largest", "first_step"),
    [
        (REFERENCE_LOSSES, 0.0, None),
        ({1: 2.0, 2: 1.0 + 9e-6, 3: 0.5}, 9e-6, None),
        ({1: 2.0, 2: 1.0 - 2e-5, 3: 0.5 + 4e-5}, 8e-5, 2),
        ({1: 2.1, 2: 1.0, 3: 0.5}, 0.05, 1),
        ({1: 2.0, 2: 1.0}, math.inf, 3),
        ({**REFERENCE_LOSSES, 4: 0.1}, math.inf, 4),
        ({1: 2.0, 2: math.nan, 3: 0.5}, math.inf, 2),
        ({}, math.inf, 1),
    ],
)
def test_losses_are_compared_step_by_step(losses: dict[int, float], largest: float, first_step: int | None) -> None:
    found = compare(REFERENCE_LOSSES, losses, 1e-5)
    assert found.largest == pytest.approx(largest, rel=1e-6)
    assert found.first_step == first_step
    assert found.agrees == (first_step is None)


def test_a_loss_of_zero_equals_nothing_but_itself() -> None:
    assert compare({1: 0.0}, {1: 0.0}, 1e-5).agrees
    assert not compare({1: 0.0}, {1: 1e-12}, 1e-5).agrees


def test_nothing_does_not_agree_with_nothing() -> None:
    assert not compare({}, {}, 1e-5).agrees


def test_the_tolerance_grows_with_the_steps_and_is_wider_for_fewer_bits() -> None:
    assert tolerance("float32", 5) == pytest.approx(1e-5)
    assert tolerance("float32", 10) == 2 * tolerance("float32", 5)
    assert tolerance("bf16", 5) > 100 * tolerance("float32", 5)


def test_metrics_are_compared_too_and_one_example_on_the_other_side_of_a_threshold_is_no_fault() -> None:
    reference = {"val/accuracy": 0.9, "val/loss": 0.5, "val/auc": 0.592}
    assert metrics_apart(reference, {"val/accuracy": 0.905, "val/loss": 0.500001, "val/auc": 0.592}, 1e-6) == {}
    apart = metrics_apart(reference, {"val/accuracy": 0.9, "val/loss": 0.51, "val/auc": 0.535}, 1e-6)
    assert list(apart) == ["val/auc", "val/loss"]
    assert list(metrics_apart(reference, {}, 1e-6)) == sorted(reference)


# Which


def test_names_are_unique_and_the_reference_is_one_process_on_the_cpu() -> None:
    names = [each.name for each in COMBINATIONS]
    assert len(set(names)) == len(names)
    assert COMBINATIONS[0] is REFERENCE and not REFERENCE.packages and not REFERENCE.gpus


# The short forms, a limit in epochs, and settings that must not disturb the comparison.
ORDINARY = "strategy: ddp\nlaunch: local\n"
ON_HOSTS = "processes: 6\nlaunch: {type: ssh, hosts: [a, b, c], network: 10.0.0.0/24}\n"
# Made for one way of running, by which none of the others is to stumble.
SHARDED = (
    "runtime: xla\ndevices: 8\nxla: {chips: [0]}\n"
    "strategy: {type: tensor, mesh: {data: 4, model: 2}, shard: {'.*weight': [model, null]}}\n"
)


@pytest.mark.parametrize("written", [ORDINARY, SHARDED, ON_HOSTS], ids=["ordinary", "sharded", "on hosts"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: each.name)
def test_every_combination_is_a_valid_config(combination: Combination, written: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text(
        f"task: task.py:Mine\n{written}train: {{epochs: 3, precision: bf16}}\n"
        "data: {workers: 2, prefetch: 3}\nearly_stop: {patience: 1}\nlog: {tensorboard: true}\n"
    )
    config = load(tmp_path / "config.yaml", (*USUAL, *needed(5), *combination.overrides))
    assert (config.train.steps, config.train.epochs, config.train.precision) == (5, None, "float32")
    assert config.early_stop is None and not config.log.tensorboard
    assert config.runtime == ("cpu" if combination.exact else combination.name.split("-")[0])
    if config.runtime == "xla":
        if config.strategy.mesh is not None:
            assert math.prod(config.strategy.mesh.values()) == config.devices
        assert bool(config.strategy.shard) == (config.strategy.has_mesh and written is SHARDED)


def test_half_of_the_steps_are_left_and_only_the_end_is_saved_after() -> None:
    assert [halfway(steps) for steps in (2, 3, 4, 5, 100)] == [1, 2, 2, 3, 50]
    assert all(halfway(steps) < steps <= 2 * halfway(steps) for steps in range(2, 50))


def test_names_may_be_patterns_and_mistakes_are_told() -> None:
    assert named(["cpu-ddp-*", "xla-single"], "--only") == {"cpu-ddp-2", "cpu-ddp-4", "xla-single"}
    with pytest.raises(ConfigError, match="--only cpu-dpp-2: no combination has this name, did you mean cpu-ddp-2"):
        named(["cpu-dpp-2"], "--only")
    with pytest.raises(ConfigError, match=r"--require q: no combination has this name, valid are cpu-single, "):
        named(["q"], "--require")


def test_what_cannot_run_here_says_why() -> None:
    assert missing(REFERENCE) is None
    nowhere = replace(REFERENCE, packages=("no-such-package",))
    assert missing(nowhere) == "no-such-package is not installed"


def test_gpus_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert missing(replace(REFERENCE, gpus=1)) == "needs a GPU, and torch sees none"
    assert missing(replace(REFERENCE, gpus=2)) == "needs 2 GPUs, and torch sees none"


# One run


@pytest.mark.parametrize(
    ("log", "reason", "code", "wanted"),
    [
        (
            "lockstep: 2 processes on cpu; run folder x\nlockstep: rank 1 of 2 on vm failed: ValueError: no\n"
            "lockstep: \nlockstep: log: x/logs/rank-1.log\n",
            "ValueError: no",
            5,
            "rank 1 of 2 on vm failed: ValueError: no",
        ),
        ("lockstep: --set devices=4: devices: unknown key\n", None, 2, "--set devices=4: devices: unknown key"),
        (
            "Traceback (most recent call last):\n  File x\nValueError: not right\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
            None,
            1,
            "ValueError: not right",
        ),
        ("", None, -9, "killed by SIGKILL (out of memory? see the kernel log), exit code -9"),
    ],
)
def test_the_headline_of_a_failure(log: str, reason: str | None, code: int, wanted: str) -> None:
    assert headline(log, reason, code) == wanted


def test_a_command_is_ended_at_its_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    began = time.monotonic()
    assert execute(command, {}, tmp_path / "log", limit=1.0) is None
    assert time.monotonic() - began < 15
    assert execute([sys.executable, "-c", "print('said'); raise SystemExit(3)"], {}, tmp_path / "log", 30.0) == 3
    assert (tmp_path / "log").read_text() == "said\n"


def test_a_moved_generator_means_random_numbers(tmp_path: Path) -> None:
    for step, state in ((3, [1, 2]), (5, [1, 2])):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"state": {"generators": state}}))
    assert not draws_random_numbers(tmp_path)
    (folder / "state.json").write_text(json.dumps({"state": {"generators": [1, 3]}}))
    assert draws_random_numbers(tmp_path)


# What is shown


def trial(losses: dict[int, float], failure: str = "") -> Trial:
    return Trial("python -m lockstep", Path("x/output.log"), Path("x"), 1.0, losses, failure)


def row(name: str, fresh: Judged, resumed: Judged | None = None) -> Row:
    return Row(replace(REFERENCE, name=name), fresh, resumed)


def judged(verdict: Any, losses: dict[int, float], **rest: Any) -> Judged:
    comparison = compare({1: 2.0, 2: 1.0}, losses, 1e-5) if verdict != "reference" else None
    return Judged(verdict, trial(losses), comparison, **rest)


FIRST = row("cpu-single", judged("reference", {1: 2.0, 2: 1.0}))
SAME = row("cpu-ddp-2", judged("agrees", {1: 2.0, 2: 1.000001}))
ABSENT = {"xla-single": "torch_xla is not installed"}
FAILED = row("cpu-ddp-4", Judged("failed", trial({}, "rank 1 failed")))


def of(*rows: Row, resume: bool = False, **rest: Any) -> Report:
    return Report(Asked(Path("c.yaml"), steps=2, resume=resume), "float32", 1e-5, rows, **rest)


def test_all_agree_and_what_is_not_here_is_listed() -> None:
    found = of(FIRST, SAME, not_here=ABSENT)
    head, *lines = report.text(found).splitlines()
    assert head.split() == ["combination", "verdict", "loss", "at", "step", "1", "2", "largest", "difference"]
    assert [line.split() for line in lines] == [
        ["cpu-single", "reference", "2", "1", "-"],
        ["cpu-ddp-2", "agrees", "2", "1.000001", "1.0e-06"],
    ]
    assert found.agrees
    absent, said = report.conclusion(found).splitlines()
    assert absent == "not here: xla-single (torch_xla is not installed)"
    assert said.startswith("all 2 agree: the largest difference is 1.0e-06 (tolerance 1e-05, ")
    assert "| cpu-ddp-2 | agrees | 2 | 1.000001 | 1.0e-06 |" in report.markdown(found)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([FIRST, FAILED], "cpu-ddp-4 failed: rank 1 failed; log: x/output.log"),
        ([FIRST, row("cpu-ddp-2", judged("differs", {1: 2.1, 2: 1.0}))], "cpu-ddp-2 differs at step 1: equal weights"),
        (
            [FIRST, row("cpu-ddp-2", judged("differs", {1: 2.0, 2: 1.1}))],
            "cpu-ddp-2 differs from step 2 on and agrees before: the forward pass is the same, the gradients",
        ),
        (
            [FIRST, replace(SAME, resumed=judged("differs", {1: 2.0, 2: 1.1}, resumed_from="cpu-single"))],
            "cpu-ddp-2, resumed from the checkpoint of cpu-single, differs from step 2 on: the checkpoint does not",
        ),
        ([FIRST], "nothing was compared: no combination but the reference can run here"),
        ([replace(FAILED, combination=REFERENCE)], "nothing was compared: cpu-single, the reference, did not run"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_agrees(rows: list[Row], says: str) -> None:
    found = of(*rows)
    assert not found.agrees
    assert says in report.conclusion(found)
    assert json.loads(report.as_json(found))["agrees"] is False


def test_what_is_required_and_not_here_is_said_and_nothing_agrees() -> None:
    found = of(FIRST, SAME, not_here=ABSENT, required={"xla-single"})
    assert not found.agrees
    assert "xla-single is required and not here: torch_xla is not installed" in report.conclusion(found)
    assert report.conclusion(found).splitlines()[-1].startswith("1 of 3 do not agree")


def test_losses_that_differ_by_design_come_with_the_remedy() -> None:
    unjudged = row("cpu-ddp-2", judged("random", {1: 2.1, 2: 1.0}))
    found = of(FIRST, unjudged, random=True, random_arguments=["dropout"])
    assert not found.agrees
    assert "compare without them: --set task.dropout=0" in report.conclusion(found)
    assert report.conclusion(found).endswith("\nnot comparable: random") and "agree" not in report.conclusion(found)
    different = row("cpu-ddp-2", judged("differs", {1: 2.1, 2: 1.0}))
    assert "norm1 normalise by the statistics of a rank's part" in report.conclusion(
        of(FIRST, different, batch_norm=["norm1"])
    )


def test_an_unstable_training_is_told_from_a_wrong_one() -> None:
    different = row("cpu-ddp-2", judged("differs", {1: 2.0, 2: 1.1}))
    wrong = report.conclusion(of(FIRST, different, control=Comparison(1e-7)))
    assert "rounding is not the reason: one process that takes its batches in halves" in wrong
    unstable = of(FIRST, different, control=Comparison(0.2, first_step=8))
    assert "rounding may be the reason" in report.conclusion(unstable)
    assert "compare with --steps 7" in report.conclusion(unstable)
    assert not unstable.agrees, "a reason is not an excuse"


def test_a_mean_over_unequal_counts_is_told_from_other_reasons() -> None:
    different = row("cpu-ddp-2", judged("differs", {1: 2.1, 2: 1.0}))
    of_tokens, of_sum = Comparison(0.002, 1, 0.002), Comparison(0.5, 1, 0.5)
    told = report.conclusion(of(FIRST, different, control=of_tokens))
    assert "the loss is a mean over unequal counts" in told and "lockstep.Mean(model(**batch).loss * n, n)" in told
    assert "rounding" not in told
    later = row("cpu-ddp-2", judged("differs", {1: 2.0, 2: 1.1}))
    assert "unequal counts" in report.conclusion(of(FIRST, later, control=Comparison(0.002, 2, 0.002)))
    assert "rounding may be" in report.conclusion(of(FIRST, later, control=Comparison(0.002, 2, 2e-5)))
    for other in (of(FIRST, different, control=of_sum), of(FIRST, different, control=of_tokens, batch_norm=["norm"])):
        assert "unequal counts" not in report.conclusion(other) and "rounding" not in report.conclusion(other)


def test_as_json() -> None:
    resumed = Judged("agrees", trial({2: 1.0}), Comparison(0.0), resumed_from="cpu-single")
    found = json.loads(report.as_json(of(FIRST, replace(SAME, resumed=resumed), not_here=ABSENT, resume=True)))
    assert (found["agrees"], found["steps"], found["resumed_at"], found["tolerance"]) == (True, 2, 1, 1e-5)
    one, two = found["combinations"]
    assert one["losses"] == {"1": 2.0, "2": 1.0} and one["largest_difference"] is None
    assert two["resumed"]["resumed_from"] == "cpu-single" and two["resumed"]["verdict"] == "agrees"
    assert found["not_here"] == ABSENT


def test_of_many_steps_the_first_and_the_last_are_shown() -> None:
    losses = {step: 1.0 / step for step in range(1, 21)}
    many = replace(of(replace(FIRST, fresh=Judged("reference", trial(losses)))), asked=Asked(Path("c"), 20))
    assert report.text(many).splitlines()[0].split()[2:9] == ["loss", "at", "step", "1", "2", "3", "20"]


# Side by side


def pool(tmp_path: Path, count: int) -> RunPool:
    made = RunPool(tmp_path, 1)
    made.count = count
    return made


def test_runs_side_by_side_come_back_in_their_order(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)  # neither gets past it alone

    def first() -> int:
        both.wait()
        time.sleep(0.1)
        return 1

    def second() -> int:
        both.wait()
        return 2

    assert pool(tmp_path, 2).side_by_side([first, second, lambda: 3]) == [1, 2, 3]


def test_a_failure_side_by_side_is_raised_and_nothing_new_is_begun(tmp_path: Path) -> None:
    begun: list[int] = []

    def fails() -> None:
        begun.append(0)
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        pool(tmp_path, 1).side_by_side([fails, lambda: begun.append(1)])
    assert begun == [0]


def test_a_run_is_ended_where_the_comparison_is_asked_to_stop(tmp_path: Path) -> None:
    stopping = threading.Event()
    stopping.set()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "log", 60, stopping)
    assert time.monotonic() - began < 30


def test_only_what_shares_nothing_is_side_by_side() -> None:
    alone = {each.name for each in COMBINATIONS if each.alone}
    assert {"cpu-ray-2", "cuda-single"} <= alone
    assert {each.name for each in COMBINATIONS if each.plain} == {
        each.name for each in COMBINATIONS if each.name.startswith(("cpu-", "exact-")) and "torchrun" not in each.name
    } - alone
