"""When to stop early."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest

from lockstep.checkpoint import codec
from lockstep.config.schema import EarlyStop
from lockstep.errors import ConfigError
from lockstep.tasks.validation import EarlyStopping, metric_value

LOSS = {"metric": "val/loss"}
ACCURACY = {"metric": "val/accuracy", "mode": "max"}


def stopping(patience: int = 2, combine: str = "any", *criteria: dict[str, Any]) -> EarlyStopping:
    return EarlyStopping(
        EarlyStop.model_validate({"criteria": criteria or [LOSS], "combine": combine, "patience": patience})
    )


def stopped_at(policy: EarlyStopping, losses: list[float], accuracies: list[float] | None = None) -> int | None:
    """The validation, counted from 1, after which training stops."""
    for number, loss in enumerate(losses, start=1):
        metrics = {"val/loss": loss, "loss": -1.0}
        if accuracies is not None:
            metrics["val/accuracy"] = accuracies[number - 1]
        if policy.update(metrics) is not None:
            return number
    return None


@pytest.mark.requirement("D15")
@pytest.mark.parametrize(
    ("patience", "criterion", "losses", "expected"),
    [
        pytest.param(2, {}, [3, 2, 1, 0], None, id="always better"),
        pytest.param(2, {}, [3, 2, 2, 2], 4, id="two in a row without improvement"),
        pytest.param(1, {}, [3, 3], 2, id="the same is no improvement"),
        pytest.param(2, {}, [3, 4, 2, 3, 3], 5, id="an improvement starts the count anew"),
        pytest.param(2, {}, [3, 4, 3.5, 3.2], 3, id="better than the last is not better than the best"),
        pytest.param(3, {}, [1, 2, 2], None, id="not before the patience is over"),
        pytest.param(2, {"mode": "max"}, [1, 2, 3], None, id="max: always better"),
        pytest.param(2, {"mode": "max"}, [3, 2, 1], 3, id="max: worse"),
        pytest.param(1, {"delta": 0.5}, [3, 2.6], 2, id="a change smaller than delta"),
        pytest.param(1, {"delta": 0.5}, [3, 2.5], 2, id="a change of just delta"),
        pytest.param(1, {"delta": 0.5}, [3, 2.4, 1.8], None, id="changes larger than delta"),
        pytest.param(2, {"delta": 0.5}, [3, 2.7, 2.4, 2.1], None, id="small steps add up to one that counts"),
        pytest.param(1, {"delta": 0.5, "mode": "max"}, [1, 1.4], 2, id="max: smaller than delta"),
        pytest.param(1, {"delta": 0.5, "mode": "max"}, [1, 1.6], None, id="max: larger than delta"),
        pytest.param(1, {"grace": 3}, [1, 2, 3, 4], 4, id="nothing counts within grace"),
        pytest.param(2, {"grace": 3}, [1, 2, 3, 4, 5], 5, id="patience begins after grace"),
        pytest.param(1, {"grace": 2}, [1, 5, 2], 3, id="the best of the grace is to be beaten"),
        pytest.param(1, {"grace": 9}, [1, 2, 3], None, id="grace longer than the run"),
        pytest.param(2, {}, [nan, nan], 2, id="NaN is no improvement"),
        pytest.param(2, {}, [1, nan, nan], 3, id="NaN after a value"),
        pytest.param(2, {}, [nan, 1, 2, 3], 4, id="a value after NaN is an improvement"),
        pytest.param(1, {"mode": "max"}, [1, inf], 2, id="infinite is no improvement"),
        pytest.param(1, {}, [1, -inf], 2, id="minus infinite is no improvement"),
        pytest.param(1, {"grace": 1}, [nan, nan], 2, id="NaN within grace does not count"),
    ],
)
def test_one_criterion(patience: int, criterion: dict[str, Any], losses: list[float], expected: int | None) -> None:
    assert stopped_at(stopping(patience, "any", {**LOSS, **criterion}), losses) == expected


@pytest.mark.requirement("D15")
@pytest.mark.parametrize(
    ("combine", "losses", "accuracies", "expected"),
    [
        ("any", [3, 3, 3], [1, 2, 3], 3),
        ("all", [3, 3, 3], [1, 2, 3], None),
        ("any", [3, 2, 1], [1, 1, 1], 3),
        ("all", [3, 2, 1], [1, 1, 1], None),
        ("any", [3, 3, 3, 3], [1, 2, 2, 2], 3),
        ("all", [3, 3, 3, 3], [1, 2, 2, 2], 4),
        ("all", [3, 3, 3, 2, 2, 2], [1, 2, 2, 2, 2, 2], 6),  # one that improves again has to run out again
    ],
)
def test_two_criteria(combine: str, losses: list[float], accuracies: list[float], expected: int | None) -> None:
    assert stopped_at(stopping(2, combine, LOSS, ACCURACY), losses, accuracies) == expected


def test_each_criterion_has_its_own_grace() -> None:
    policy = stopping(1, "any", {**LOSS, "grace": 5}, {**ACCURACY, "grace": 2})
    assert stopped_at(policy, [1, 2, 3, 4], [1, 0, 0, 0]) == 3


def test_the_reason_names_what_did_not_improve_and_the_best_that_was() -> None:
    policy = stopping(1, "any", LOSS, ACCURACY)
    assert policy.update({"val/loss": 0.5, "val/accuracy": 0.1}) is None
    assert policy.update({"val/loss": 0.7, "val/accuracy": 0.2}) == (
        "no improvement of val/loss (best 0.5) in 1 validations"
    )


def test_a_metric_that_never_was_a_number_is_a_reason_too() -> None:
    assert stopping(1).update({"val/loss": nan}) is not None


@pytest.mark.requirement("D15")
@pytest.mark.parametrize("cut", range(7))
def test_a_restored_policy_decides_as_one_that_was_never_interrupted(cut: int) -> None:
    losses, accuracies = [3.0, nan, 2.0, 2.1, 2.2, 2.3, 2.4], [0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3]
    criteria = ({**LOSS, "grace": 1}, {**ACCURACY, "delta": 0.05})
    whole, before, after = (stopping(3, "all", *criteria) for _ in range(3))
    expected = [whole.update({"val/loss": a, "val/accuracy": b}) for a, b in zip(losses, accuracies, strict=True)]
    found = [before.update({"val/loss": a, "val/accuracy": b}) for a, b in zip(losses[:cut], accuracies, strict=False)]
    tree, tensors = codec.pack(before.state_dict())
    after.load_state_dict(codec.unpack(json.loads(json.dumps(tree)), tensors))
    rest = zip(losses[cut:], accuracies[cut:], strict=True)
    found += [after.update({"val/loss": a, "val/accuracy": b}) for a, b in rest]
    assert found == expected
    assert any(expected)


# Metrics by name


@pytest.mark.requirement("D06")
def test_without_validation_data_training_metrics_decide() -> None:
    policy = stopping(1)
    assert policy.update({"train/epoch_loss": 1.0}) is None
    assert policy.update({"train/epoch_loss": 2.0}) == "no improvement of val/loss (best 1) in 1 validations"


@pytest.mark.parametrize(
    ("metrics", "name", "expected"),
    [
        ({"val/loss": 1.0, "train/epoch_loss": 2.0}, "val/loss", 1.0),
        ({"val/loss": 1.0, "train/epoch_loss": 2.0}, "train/epoch_loss", 2.0),
        ({"train/epoch_loss": 2.0}, "val/loss", 2.0),
        ({"val/loss": 0.0, "train/epoch_loss": 2.0}, "val/loss", 0.0),
    ],
)
def test_a_metric_is_found_by_its_name(metrics: dict[str, float], name: str, expected: float) -> None:
    assert metric_value(metrics, name, "somewhere") == expected


def test_a_metric_that_is_not_there_is_told_with_those_that_are() -> None:
    policy = stopping(1, "any", LOSS, {"metric": "val/acuracy"})
    with pytest.raises(ConfigError) as refused:
        policy.update({"val/loss": 1.0, "train/epoch_loss": 2.0})
    assert str(refused.value) == (
        "early_stop.criteria[1].metric: there is no metric 'val/acuracy'. This run has train/epoch_loss, val/loss"
    )


def test_training_metrics_do_not_stand_for_validation_metrics_of_another_kind() -> None:
    """`train/epoch_loss` is no `val/x`, and a `val/` metric is never taken for a training one."""
    with pytest.raises(ConfigError, match="there is no metric 'accuracy': did you mean val/accuracy"):
        metric_value({"val/accuracy": 1.0}, "accuracy", "scheduler.monitor")


def test_a_run_without_metrics_says_so() -> None:
    with pytest.raises(ConfigError, match="This run has none"):
        metric_value({}, "val/loss", "scheduler.monitor")
