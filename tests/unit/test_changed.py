"""A restored optimizer that is told other settings goes on as if it had had them from the start, if that is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.errors import ConfigError
from lockstep.tasks.changes import OptimizerArguments

Schedule = Callable[[Optimizer], Any]


def arguments_of(given: dict[str, Any] | None) -> OptimizerArguments:
    return OptimizerArguments(
        None if given is None else OptimizerSettings.model_validate({"type": "torch.optim.SGD", **given})
    )


def apply_changes(optimizer: Optimizer, scheduler: Any, saved: Any, current: Any) -> list[str]:
    arguments = arguments_of(current)
    arguments.load_state_dict(arguments_of(saved).state_dict())
    return arguments.apply(optimizer, scheduler)


def parameters(groups: int = 1) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)]


def rates(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step(1.0 - step) if isinstance(scheduler, schedules.ReduceLROnPlateau) else scheduler.step()
    return found


def restored(optimizer: Optimizer, scheduler: Any, kind: type[Optimizer], make: Schedule, **arguments: Any) -> Any:
    """What a process that resumes has: made from the new config, with the old state in it."""
    again = kind(parameters(len(optimizer.param_groups)), **arguments)
    schedule = make(again)
    again.load_state_dict(optimizer.state_dict())
    schedule.load_state_dict(scheduler.state_dict())
    return again, schedule


def sequence(optimizer: Optimizer) -> Any:
    warm_up = schedules.LinearLR(optimizer, 0.1, total_iters=4)
    return schedules.SequentialLR(optimizer, [warm_up, schedules.CosineAnnealingLR(optimizer, 12)], [4])


SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2, 0.5),
    "ExponentialLR": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: min(step, 3) / 3),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "PolynomialLR": lambda optimizer: schedules.PolynomialLR(optimizer, 10),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 10),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
    "SequentialLR": sequence,
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_schedule_goes_on_as_if_it_had_begun_with_the_new_rate(name: str, steps: int) -> None:
    make = SCHEDULES[name]
    reference = SGD(parameters(), lr=0.3)
    expected = rates(reference, make(reference), 10)

    old = SGD(parameters(), lr=0.1)
    schedule = make(old)
    rates(old, schedule, steps)
    new, again = restored(old, schedule, SGD, make, lr=0.3)
    (told,) = apply_changes(new, again, {"lr": 0.1}, {"lr": 0.3})
    assert told.startswith("optimizer.lr: 0.1 -> 0.3 from here on")
    assert told.endswith(f"with {expected[steps]:.6g} now")
    if name != "ReduceLROnPlateau":  # which counts what it has seen
        assert rates(new, again, 10 - steps) == pytest.approx(expected[steps:])
    assert apply_changes(new, again, {"lr": 0.3}, {"lr": 0.3}) == [], "what is saved from here on says so"


def test_without_a_schedule_the_rate_is_what_the_config_says() -> None:
    new = AdamW(parameters(), lr=0.2)
    new.load_state_dict(AdamW(parameters(), lr=0.1).state_dict())
    assert apply_changes(new, None, {"lr": 0.1}, {"lr": 0.2}) == ["optimizer.lr: 0.1 -> 0.2 from here on"]
    assert new.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("kind", "saved", "current", "found"),
    [
        (SGD, {"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.1, "weight_decay": 0.25}, {"weight_decay": 0.25}),
        (SGD, {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.25}, {"weight_decay": 0.25}),
        (SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.5}, {"momentum": 0.5}),
        (Adam, {"betas": [0.9, 0.99]}, {"betas": [0.8, 0.99]}, {"betas": [0.8, 0.99]}),
        (Adam, {"betas": [0.9, 0.99]}, {}, {"betas": [0.9, 0.999]}),  # back to what is usual
        (Adam, {}, {"lr": 0.5}, {"lr": 0.5}),
        (Adam, {"lr": 0.5}, {}, {"lr": 0.001}),
        (Adam, {"lr": 0.5, "eps": 1e-8}, {"lr": 0.25, "eps": 1e-6}, {"lr": 0.25, "eps": 1e-6}),
    ],
)
def test_every_setting_that_differs_is_changed_and_no_other(
    kind: type[Optimizer], saved: dict[str, Any], current: dict[str, Any], found: dict[str, Any]
) -> None:
    old, new = kind(parameters(), **saved), kind(parameters(), **current)
    new.load_state_dict(old.state_dict())
    told = apply_changes(new, None, saved, current)
    assert len(told) == len(found)
    before, after = (each.state_dict()["param_groups"][0] for each in (old, new))
    changed = {name: value for name, value in after.items() if before[name] != value}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()} == found


def test_a_group_with_a_value_of_its_own_keeps_it_and_its_rate_is_scaled() -> None:
    old, new = (SGD(parameters(2), lr=lr, weight_decay=decay) for lr, decay in ((0.1, 0.5), (0.2, 0.25)))
    old.param_groups[1].update(weight_decay=0.0, lr=0.01)
    new.load_state_dict(old.state_dict())
    apply_changes(new, None, {"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.2, "weight_decay": 0.25})
    assert [group["weight_decay"] for group in new.param_groups] == [0.25, 0.0]
    assert [group["lr"] for group in new.param_groups] == pytest.approx([0.2, 0.02])


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    new = Adam(parameters(), lr=torch.tensor(0.2), foreach=False, capturable=True)
    tensor = new.param_groups[0]["lr"].fill_(0.1)
    apply_changes(new, None, {"lr": 0.1}, {"lr": 0.2})
    assert new.param_groups[0]["lr"] is tensor and float(tensor) == pytest.approx(0.2)


@pytest.mark.parametrize("arguments", [(None, None), (None, {"lr": 0.1}), ({"lr": 0.1}, None)])
def test_an_optimizer_that_is_not_the_configs_is_left_alone(arguments: Any) -> None:
    assert apply_changes(SGD(parameters(), lr=3.0), None, *arguments) == []


class Opaque:
    """A scheduler of somebody's own, that does not say what it does."""

    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "old", "why"),
    [
        (
            lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=9),
            0.1,
            "OneCycleLR has rates that do not scale",
        ),
        (lambda optimizer: schedules.CyclicLR(optimizer, 0.1, 0.2), 0.1, "CyclicLR has rates that do not scale"),
        (lambda optimizer: Opaque(), 0.1, "Opaque has rates that do not scale"),
        (lambda optimizer: schedules.StepLR(optimizer, 1), 0.0, "nothing can be scaled from it"),
        (
            lambda optimizer: schedules.ChainedScheduler(
                [schedules.StepLR(optimizer, 1), schedules.CosineAnnealingLR(optimizer, 9, eta_min=0.1)]
            ),
            0.1,
            "CosineAnnealingLR has rates that do not scale",
        ),
    ],
)
def test_what_cannot_be_done_right_is_refused(make: Schedule, old: float, why: str) -> None:
    optimizer = SGD(parameters(), lr=0.3, momentum=0.9)
    with pytest.raises(ConfigError, match=why) as refused:
        apply_changes(optimizer, make(optimizer), {"lr": old}, {"lr": 0.3})
    assert str(refused.value).startswith(f"optimizer.lr: {old} -> 0.3: ")


def test_a_setting_that_is_not_in_the_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.warmth: 1 -> 2: SGD does not keep it"):
        apply_changes(SGD(parameters(), lr=0.1), None, {"warmth": 1}, {"warmth": 2})
