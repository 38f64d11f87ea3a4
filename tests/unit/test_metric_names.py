"""Names of metrics in a config, known before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.train.trainer import check_metrics


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"task": "task.py:Mine", **sections})


VALIDATED = ["val/loss", "val/accuracy"]


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
        check_metrics(config(**sections), monitor, VALIDATED, open_ended=False)


@pytest.mark.parametrize(
    ("sections", "validated", "open_ended"),
    [
        ({}, VALIDATED, False),
        ({}, [], False),
        ({"early_stop": {}}, [], False),  # val/loss stands for train/loss
        ({"checkpoint": {"keep": {"metric": "val/accuracy", "mode": "max"}}}, VALIDATED, False),
        ({"checkpoint": {"keep": {"metric": "val/x", "best": 0}}}, VALIDATED, False),  # nobody asks for it
        ({"early_stop": {"criteria": [{"metric": "train/generator"}]}}, [], True),  # what a task of its own logs
        ({}, ["val/made"], True),  # the default is no wish
    ],
)
def test_names_that_will_be_there_pass(sections: dict[str, Any], validated: list[str], open_ended: bool) -> None:
    check_metrics(config(**sections), None, validated, open_ended)
