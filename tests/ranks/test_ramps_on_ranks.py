"""Ramps of batch size and sequence length, limits and schedules by tokens: the numbers of a loop in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ramp_tasks
import torch

import lockstep
from conftest import Project, last_weights, rows, steps_saved
from lockstep.errors import ConfigError

TASK = f"{ramp_tasks.__file__}:Text"
SGD = {"type": "torch.optim.SGD", "lr": ramp_tasks.RATE, "momentum": 0.9}


def stages(unit: int, *stages: tuple[int, int], end: int) -> Any:
    """A function of (steps, tokens): a size up to each limit."""
    return lambda *done: next((size for until, size in stages if done[unit] < until), end)


def trained(out: Path, task: dict[str, Any] | None = None, **values: Any) -> Path:
    """Trains on this process."""
    values = {"runtime": "cpu", "optimizer": SGD, "log": {"every": "1 step"}, **values}
    return Path(lockstep.train({"task": {"type": TASK, **(task or {})}, **values}, processes=1, out=out)["folder"])


def tokens_of(run: Path) -> dict[int, int]:
    return {row["step"]: row["tokens"] for row in rows(run) if "tokens" in row}


def same(run: Path, expected: tuple[dict[str, torch.Tensor], dict[int, int]], apart: float) -> None:
    weights, tokens = expected
    assert tokens_of(run) == tokens
    found = last_weights(run)
    assert found.keys() == weights.keys()
    for name, each in weights.items():
        torch.testing.assert_close(found[name], each, rtol=apart, atol=apart)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_ramp_by_steps_is_the_loop_in_plain_torch(tmp_path: Path, drop_last: bool) -> None:
    """Sizes change in the midst of an epoch, with its short batch before and after."""
    train = {"steps": 17, "batch_size": 20, "batch_ramp": {"start": 5, "steps": 9}}
    run = trained(tmp_path, train=train, data={"drop_last": drop_last})
    size = stages(0, (3, 5), (6, 10), (9, 15), end=20)
    expected = ramp_tasks.by_hand(size, lambda *_: 12, ramp_tasks.Text(), lambda step, _: step == 17, drop_last)
    same(run, expected, 1e-6)


def test_everything_by_tokens_is_the_loop_in_plain_torch(tmp_path: Path) -> None:
    """Examples of different lengths; batches, sequences and the rate follow the tokens, which end the run."""
    train = {
        "tokens": "1.5e3", "batch_size": 16, "accumulate": 2,
        "batch_ramp": [{"size": 6, "tokens": 300}, {"size": 9, "tokens": 400}, {"size": 16}],
        "sequence_ramp": {"start": 4, "end": 12, "tokens": 600},
    }  # fmt: skip
    schedule = {"type": "cosine", "warmup": "200 tokens", "final": 0.1}
    run = trained(tmp_path, {"differ": True}, train=train, scheduler=schedule)
    expected = ramp_tasks.by_hand(
        stages(1, (300, 6), (700, 9), end=16), stages(1, (300, 4), (600, 8), end=12), ramp_tasks.Text(differ=True),
        lambda _, tokens: tokens >= 1500, rate=ramp_tasks.cosine(200, 1500, 0.1),
    )  # fmt: skip
    same(run, expected, 1e-6)


RAMPS = {
    "batch_size": 16,
    "accumulate": 2,
    "batch_ramp": {"start": 4, "tokens": 900},
    "sequence_ramp": [{"size": 5, "steps": 6}, {"size": 12}],
}


def test_a_run_continues_in_the_midst_of_its_ramps_on_other_ranks(project: Project) -> None:
    schedule = {"type": "linear", "warmup": "10%"}
    values = {"optimizer": SGD, "data": {}, "task": {"type": TASK, "differ": True}, "scheduler": schedule}
    run = project.train(
        train={**RAMPS, "tokens": 2000}, processes=2, checkpoint={"every": "1 step", "keep": {"last": 99}}, **values
    )
    kept = steps_saved(run)
    for step, ranks in ((4, 3), (11, 1)):
        assert step in kept
        changes = ["--set", f"processes={ranks}"]
        finished = project.run("resume", run, "--step", step, *changes)
        assert finished.code == 0, finished.text
        sizes = stages(1, (300, 4), (600, 8), (900, 12), end=16)
        expected = ramp_tasks.by_hand(
            sizes, stages(0, (6, 5), end=12), ramp_tasks.Text(differ=True), lambda _, tokens: tokens >= 2000,
            rate=lambda before, after: min(after / 200, 1.0) if before < 200 else 1 - (before - 200) / 1800,
        )  # fmt: skip
        same(run, expected, 1e-5)


def test_exact_bits_on_any_number_of_ranks(project: Project) -> None:
    values = {"optimizer": SGD, "data": {}, "task": {"type": TASK, "differ": True}}
    train = {**RAMPS, "exact": 2, "tokens": 1200}
    one, two = (project.train(train=train, processes=ranks, out=f"on-{ranks}", **values) for ranks in (1, 2))
    assert tokens_of(one) == tokens_of(two)
    found = last_weights(two)
    assert all(torch.equal(each, found[name]) for name, each in last_weights(one).items())


def test_schedules_by_tokens_of_equal_batches_are_those_by_steps(tmp_path: Path) -> None:
    """61 examples in batches of 7, the last of 5: 5 epochs without it have 40 steps of 84 tokens."""
    data, train = {"drop_last": True}, {"batch_size": 7}
    by_steps, by_tokens = (
        trained(tmp_path / name, train={**train, **limit}, data=data, scheduler={"type": "cosine", "warmup": warmup})
        for name, limit, warmup in (("steps", {"steps": 40}, 10), ("tokens", {"tokens": 40 * 84}, "840 tokens"))
    )
    rates = [{row["step"]: row["lr"] for row in rows(run) if "lr" in row} for run in (by_steps, by_tokens)]
    assert rates[0] == pytest.approx(rates[1]) and len(rates[0]) == 40
    # A schedule of torch knows the number of steps of either, and that of epochs.
    auto = {"type": "CosineAnnealingLR", "T_max": "auto", "every": "1 step"}
    ramps = {"batch_ramp": {"start": 1, "by": 2, "steps": 9}, "tokens": 40 * 84}
    for limit in ({"tokens": 40 * 84}, ramps):
        run = trained(tmp_path / "auto", train={**train, **limit}, data=data, scheduler=auto)
        last = next(row for row in rows(run)[::-1] if "lr" in row)
        assert (last["lr"] < 0.02 * ramp_tasks.RATE) and last["step"] == (40 if limit is not ramps else 46)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"train": {"tokens": 9}, "task": "Uncounted"}, r"train\.tokens: tokens are counted by Uncounted\.tokens_per_"),
        ({"train": {"sequence_ramp": {"start": 1, "end": 2, "steps": 3}}, "task": "Uncounted"}, "define cut"),
        (
            {"train": {"batch_ramp": {"start": 16, "tokens": 3}}, "task": "Uncounted"},
            r"train\.batch_ramp: tokens are counted by",
        ),
        (
            {"train": {"batch_ramp": {"start": 16, "steps": 3}}, "task": "Streamed"},
            r"train\.batch_ramp: train_data\(\) is a stream",
        ),
        (
            {"train": {"batch_ramp": {"start": 16, "steps": 3}}, "data": {"order": "buckets"}},
            r"train\.batch_ramp: data\.order: buckets puts 32",
        ),
        ({"train": {"tokens": 900}, "scheduler": {"type": "linear", "warmup": 3}}, r"scheduler\.warmup: 3 steps, but"),
        (
            {"train": {"steps": 900}, "scheduler": {"type": "linear", "warmup": "3 tokens"}},
            r"scheduler\.warmup: 3 tokens, but the run ends by its steps",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    task = {"type": f"{ramp_tasks.__file__}:{values.pop('task', 'Text')}"}
    with pytest.raises(ConfigError, match=told):
        trained(tmp_path, task, **values)
    assert not any((each / "metrics.jsonl").exists() for each in tmp_path.iterdir())


def test_a_stream_counts_its_tokens(tmp_path: Path) -> None:
    run = trained(tmp_path, {"type": f"{ramp_tasks.__file__}:Streamed"}, train={"tokens": 100, "batch_size": 4})
    assert tokens_of(run) == {1: 48, 2: 96, 3: 144}
