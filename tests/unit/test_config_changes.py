"""What a resume may change, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.changes import FIXED, changes, described, refuse_wrong_changes
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError

BASE: dict[str, Any] = {
    "task": {"type": "digits.py:Digits", "hidden": 128},
    "train": {"epochs": 2, "batch_size": 32},
    "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
    "scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "step_size": 3},
    "data": {"split": {"train": 0.8, "val": 0.2}},
    "early_stop": {"criteria": [{"metric": "val/loss"}]},
}


def found(**values: Any) -> list[str]:
    before, after = RunConfig.model_validate(BASE).plain(), RunConfig.model_validate({**BASE, **values}).plain()
    return [str(change) for change in changes(before, after)]


def resume_with(**values: Any) -> None:
    before, after = RunConfig.model_validate(BASE).plain(), RunConfig.model_validate({**BASE, **values}).plain()
    refuse_wrong_changes(changes(before, after), after)


def test_no_change_is_found_between_equal_configs() -> None:
    assert found() == []


def test_a_change_shows_its_path_and_both_values() -> None:
    assert found(train={"epochs": 5, "batch_size": 32}) == ["train.epochs: 2 -> 5"]
    assert found(processes=4) == ["processes: 'auto' -> 4"]


def test_changes_come_in_the_order_of_the_config() -> None:
    shown = found(train={"epochs": 9, "batch_size": 32}, launch={"port": 4000}, processes=3)
    assert [text.split(":")[0] for text in shown] == ["processes", "launch.port", "train.epochs"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"z": 0, "a": None}, {"z": 0}, []),  # what is not said and what is said to be nothing are the same
        ({"z": 0, "a": 1}, {"z": 0}, ["a: 1 -> None"]),
        ({"z": 0}, {"z": 0, "a": {"b": 1}}, ["a.b: None -> 1"]),
        ({"a": None}, {"a": {"b": 1}}, ["a.b: None -> 1"]),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, ["a.c: None -> 2"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 -> 3"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a[1]: None -> 2"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, ["a[0].b: 1 -> 2"]),
        ({"a": []}, {"a": [1]}, ["a: [] -> None", "a[0]: None -> 1"]),
    ],
)
def test_every_path_that_differs_is_found(before: dict[str, Any], after: dict[str, Any], expected: list[str]) -> None:
    assert [str(change) for change in changes(before, after)] == expected


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"task": {"type": "digits.py:Digits", "hidden": 64}}, "task.hidden: 128 -> 64"),
        ({"task": "digits.py:Other"}, "task.type"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"train": {"epochs": 2, "batch_size": 64}}, "train.batch_size: 32 -> 64"),
        ({"data": {"split": {"train": 0.7, "val": 0.3}}}, "data.split.train: 0.8 -> 0.7"),
        ({"data": {}}, "data.split"),
        ({"data": {"split": {"train": 0.8, "val": 0.2}, "shuffle": False}}, "data.shuffle: True -> False"),
        ({"data": {"split": {"train": 0.8, "val": 0.2}, "drop_last": True}}, "data.drop_last: False -> True"),
        ({"optimizer": {"type": "torch.optim.Adam", "lr": 0.1}}, "optimizer.type: 'torch.optim.SGD' -> "),
        ({"optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "nesterov": True}}, "optimizer.nesterov: None -> True"),
        ({"optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}}, "optimizer.momentum: None -> 0.9"),
        ({"optimizer": {"type": "torch.optim.SGD", "lr": "0.1"}}, "optimizer.lr: 0.1 -> '0.1'"),
        (
            {"optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "initial_accumulator_value": 0.1}},
            "it counts only for an optimizer that is new",
        ),
        ({"optimizer": None}, "optimizer.type"),
        ({"scheduler": None}, "scheduler.type"),
        ({"early_stop": {"criteria": [{"metric": "val/accuracy"}]}}, "early_stop.criteria[0].metric"),
        (
            {"early_stop": {"criteria": [{"metric": "val/loss"}, {"metric": "val/f1"}]}},
            "early_stop.criteria[1].metric: None -> 'val/f1' (the best values so far",
        ),
    ],
)
def test_a_resume_refuses_what_the_checkpoint_depends_on(values: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be resumed with a config that changed in") as refused:
        resume_with(**values)
    assert path in str(refused.value)
    assert "start a new run with `lockstep train`" in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"processes": 4},
        {"optimizer": {"type": "torch.optim.SGD", "lr": 0.01}},
        {"optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.5, "betas": [0.9, 0.95]}},
        {"optimizer": "torch.optim.SGD"},
        {"train": {"epochs": 10, "batch_size": 32}},
        {"train": {"steps": 500, "batch_size": 32, "accumulate": 2, "clip_norm": 1.0}},
        {"data": {"split": {"train": 0.8, "val": 0.2}, "workers": 2, "prefetch": 4, "pin_memory": True}},
        {"validate": {"every": "10 steps", "on": "rank0"}},
        {"checkpoint": {"every": None, "keep": {"last": 5}}},
        {"early_stop": {"criteria": [{"metric": "val/loss"}], "patience": 9, "combine": "all"}},
        {"early_stop": None},
        {"launch": {"port": 4000, "max_restarts": 3}, "timeouts": {"collective": 5}},
        {"log": {"every": "1 step", "tensorboard": True}},
        {"name": "other"},
        {"train": {"epochs": 2, "batch_size": 32, "activation_checkpointing": "blocks", "compile": "blocks"}},
        {"strategy": {"blocks": "layers.*"}},
    ],
)
def test_a_resume_accepts_everything_else(values: dict[str, Any]) -> None:
    resume_with(**values)


def test_every_wrong_change_is_named_at_once_with_its_reason() -> None:
    with pytest.raises(ConfigError) as refused:
        resume_with(seed=3, optimizer={"type": "torch.optim.Adam", "lr": 0.3})
    assert "seed: 0 -> 3 (the order of examples is a function of it)" in str(refused.value)
    assert "'torch.optim.Adam' (the saved state belongs to this optimizer)" in str(refused.value)
    assert "optimizer.lr" not in str(refused.value)


def test_a_rate_that_a_schedule_does_not_start_from_is_refused() -> None:
    cycle = {"scheduler": {"type": "torch.optim.lr_scheduler:OneCycleLR", "max_lr": 1}}
    before = RunConfig.model_validate({**BASE, **cycle}).plain()
    after = RunConfig.model_validate({**BASE, **cycle, "optimizer": {"type": "torch.optim.SGD", "lr": 0.3}}).plain()
    with pytest.raises(ConfigError, match="OneCycleLR has rates of its own, whatever the optimizer's is"):
        refuse_wrong_changes(changes(before, after), after)


def test_what_a_change_does_is_said() -> None:
    optimizer = {"type": "torch.optim.SGD", "lr": 0.3, "weight_decay": 0.1}
    before, after = (
        RunConfig.model_validate({**BASE, **values}).plain()
        for values in ({}, {"optimizer": optimizer, "processes": 2})
    )
    assert [described(change) for change in changes(before, after)] == [
        "processes: 'auto' -> 2",
        "optimizer.lr: 0.1 -> 0.3 (from the first step on that is trained now; a schedule goes on as if it had "
        "started from the new rate)",
        "optimizer.weight_decay: None -> 0.1 (from the first step on that is trained now)",
    ]


def test_every_fixed_path_is_one_that_configs_have() -> None:
    plain = RunConfig.model_validate(BASE).plain()
    for path in FIXED:
        node: Any = plain
        for key in path.split("."):
            assert key in node, path
            node = node[key]
