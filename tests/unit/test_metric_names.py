"""Names of metrics in a config, known before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.tasks.trainer import check_metrics, metrics_asked_for


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"task": "task.py:Mine", **sections})


VALIDATED = ["val/loss", "val/accuracy"]


def check(sections: dict[str, Any], monitors: list[str], validated: list[str], *open_ended: str) -> None:
    there = dict.fromkeys(["train/epoch_loss", *validated], 0.0)
    check_metrics(metrics_asked_for(config(**sections), monitors), there, open_ended)


@pytest.mark.parametrize(
    ("sections", "monitor", "told"),
    [
        ({"checkpoint": {"keep": {"metric": "val/acuracy"}}}, None, r"checkpoint\.keep\.metric: .* 'val/acuracy'"),
        ({"early_stop": {"criteria": [{"metric": "val/los"}]}}, None, r"early_stop.criteria.0..metric: .* val/loss"),
        ({}, "val/lose", r"scheduler\.monitor: .* did you mean val/loss\?"),
    ],
)  # fmt: skip
def test_a_name_that_no_metric_has_is_refused_with_the_nearest(
    sections: dict[str, Any], monitor: str | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check(sections, [monitor] if monitor else [], VALIDATED)


@pytest.mark.parametrize(
    ("sections", "validated", "open_ended"),
    [
        ({}, VALIDATED, False),
        ({}, [], False),
        ({"early_stop": {}}, [], False),  # val/loss stands for train/epoch_loss
        ({"checkpoint": {"keep": {"metric": "val/accuracy", "mode": "max"}}}, VALIDATED, False),
        ({"checkpoint": {"keep": {"metric": "val/x", "best": 0}}}, VALIDATED, False),  # nobody asks for it
        ({"early_stop": {"criteria": [{"metric": "train/epoch_generator"}]}}, [], True),  # what a task of its own logs
        ({}, ["val/made"], True),  # the default is no wish
    ],
)
def test_names_that_will_be_there_pass(sections: dict[str, Any], validated: list[str], open_ended: bool) -> None:
    check(sections, [], validated, *(["train"] if open_ended else []))
