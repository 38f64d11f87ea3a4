"""Saves the state of an optimizer under the names of its parameters, and finds it again by them.

Torch numbers parameters in the order in which the optimizer was given them. That order may change between two starts of
a run, and with equal shapes nobody would notice that moments were exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from lockstep.errors import ConfigError

Names = Mapping[int, str]  # by the identity of a parameter

_PARTS = {"state", "param_groups"}


def by_name(state: Mapping[str, Any], optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """What `optimizer.state_dict()` returned, with names in place of numbers."""
    if not state.keys() >= _PARTS:  # a class that keeps its state in its own way
        return dict(state)
    groups = [
        {**saved, "params": [names.get(id(each), f"parameter {number}") for number, each in
                             zip(saved["params"], group["params"], strict=True)]}
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]  # fmt: skip
    named = _numbers(state["param_groups"], groups)
    return {
        **state,
        "state": {named.get(number, number): each for number, each in state["state"].items()},
        "param_groups": groups,
    }


def by_number(state: Mapping[str, Any], optimizer: Optimizer, names: Names, source: str) -> dict[str, Any]:
    """The same with the numbers that parameters have in this optimizer."""
    if not state.keys() >= _PARTS:
        return dict(state)
    groups = []
    own = by_name(optimizer.state_dict(), optimizer, names)["param_groups"]
    left = list(state["param_groups"])
    number = 0
    for group in own:
        saved = next((each for each in left if set(each["params"]) == set(group["params"])), None)
        if saved is None:
            raise _other_parameters(state["param_groups"], own, source)
        left.remove(saved)
        groups.append({**saved, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    if left:
        raise _other_parameters(state["param_groups"], own, source)
    numbers = {name: number for number, name in _numbers(groups, own).items()}
    return {
        **state,
        "state": {numbers.get(name, name): each for name, each in state["state"].items()},
        "param_groups": groups,
    }


def _numbers(numbered: list[dict[str, Any]], named: list[dict[str, Any]]) -> dict[int, str]:
    return {
        number: name
        for group, names in zip(numbered, named, strict=True)
        for number, name in zip(group["params"], names["params"], strict=True)
    }


def _other_parameters(saved: list[dict[str, Any]], own: list[dict[str, Any]], source: str) -> ConfigError:
    before = {name: index for index, group in enumerate(saved) for name in group["params"]}
    now = {name: index for index, group in enumerate(own) for name in group["params"]}
    missing, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
    if missing or gone:
        name = (missing or gone)[0]
        what = f"{name!r} is {'not in it' if missing else 'no longer trained'}"
    else:
        what = "the parameters are in other groups"
    return ConfigError(
        f"{source}: the saved state of the optimizer does not fit: {what}. Resume with the parameters and groups that "
        "the run was started with, or start a new run with init_from"
    )
