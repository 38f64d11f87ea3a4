"""A resume with other settings of the optimizer: what the restored state has to be told of them.

Restoring brings back the param groups as they were saved, so that what the config says now would count for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lockstep.errors import ConfigError

Group = dict[str, Any]


class OptimizerArguments:
    """The config's arguments of the optimizer, kept in every checkpoint: attached to the run before it is restored."""

    def __init__(self, current: Mapping[str, Any] | None) -> None:
        self.current = None if current is None else dict(current)
        self.saved: Mapping[str, Any] | None = None  # of the checkpoint, once restored

    def state_dict(self) -> dict[str, Any]:
        return {"arguments": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.saved = state["arguments"]


def apply_changes(
    optimizer: Optimizer, scheduler: Any, saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None
) -> list[str]:
    """Bring a restored optimizer, and its scheduler, to the arguments that the config has now; what was changed.

    `saved` are the arguments of the config under which the checkpoint was made, `current` those of the optimizer as it
    was made in this process. Both are None where the optimizer is not the config's own. Called after everything is
    restored; a pure function of its arguments, so all ranks do the same.
    """
    if saved is None or current is None:
        return []
    told = []
    for name in dict.fromkeys([*saved, *current]):
        if _plain(saved.get(name)) == _plain(current.get(name)):
            continue
        before = saved.get(name, _default(optimizer, name))
        after = current.get(name, optimizer.defaults.get(name))
        if after is None or not all(name in group for group in optimizer.param_groups):
            raise ConfigError(
                f"optimizer.{name}: {before!r} -> {current.get(name)!r}: {type(optimizer).__name__} does not keep it "
                "where it can be changed. Take the change back, or start a new run"
            )
        if name == "lr":
            told.append(_change_rate(optimizer, scheduler, float(before), float(after)))
        else:
            # Groups that have another value than the config's have it from somebody else, who knows why.
            for group in optimizer.param_groups:
                if _plain(group[name]) == _plain(before):
                    _set(group, name, after)
            told.append(f"optimizer.{name}: {before!r} -> {after!r} from here on")
    return told


def _change_rate(optimizer: Optimizer, scheduler: Any, before: float, after: float) -> str:
    """Another learning rate: what a schedule has made of the old one is made of the new one."""
    schedulers = list(_all_of(scheduler))
    floor = _floor(schedulers, before, after)
    for group in optimizer.param_groups:
        _set(group, "lr", _moved(float(group["lr"]), before, after, floor))
        if "initial_lr" in group:
            _set(group, "initial_lr", _moved(float(group["initial_lr"]), before, after, floor))
    rates = [group["lr"] for group in optimizer.param_groups]
    for each in schedulers:
        if hasattr(each, "base_lrs"):
            each.base_lrs = [_moved(float(rate), before, after, floor) for rate in each.base_lrs]
        if hasattr(each, "_last_lr"):
            each._last_lr = [float(rate) for rate in rates]
    told = f"optimizer.lr: {before:g} -> {after:g} from here on"
    if schedulers:
        told += f"; the schedule of {type(scheduler).__name__} goes on from there, with {float(rates[0]):.6g} now"
    return told


def _moved(rate: float, before: float, after: float, floor: float) -> float:
    """A rate that was made of `before`, made of `after`; both above a floor that a schedule falls to."""
    return after if rate == before else floor + (rate - floor) * (after - floor) / (before - floor)


def _floor(schedulers: list[Any], before: float, after: float) -> float:
    """Refuse where a schedule does not depend on the rate, or in a way that is not known here."""
    leaves = [each for each in schedulers if not hasattr(each, "_schedulers")]
    for each in leaves:
        name = type(each).__name__
        if isinstance(each, (OneCycleLR, CyclicLR)):
            raise _refused(before, after, f"{name} has rates of its own, whatever the optimizer's is")
        if not hasattr(each, "base_lrs") and not isinstance(each, ReduceLROnPlateau):
            raise _refused(before, after, f"{name} does not say what rate it started from (base_lrs)")
    floors = {float(getattr(each, "eta_min", 0.0)) for each in leaves}
    if len(floors) > 1:
        raise _refused(before, after, "the schedule is made of several that fall to different rates (eta_min)")
    floor = floors.pop() if floors else 0.0
    if before == floor:
        raise _refused(before, after, "the old rate is one that nothing can be scaled from")
    return floor


def _all_of(scheduler: Any) -> Iterable[Any]:
    """A scheduler and those that it is made of."""
    if scheduler is not None:
        yield scheduler
        for each in getattr(scheduler, "_schedulers", ()):
            yield from _all_of(each)


def _refused(before: float, after: float, why: str) -> ConfigError:
    return ConfigError(f"optimizer.lr: {before:g} -> {after:g}: {why}. Take the change back, or start a new run")


def _default(optimizer: Optimizer, name: str) -> Any:
    """What a setting was where the config did not say."""
    parameter = inspect.signature(type(optimizer)).parameters.get(name)
    usual = None if parameter is None or parameter.default is parameter.empty else parameter.default
    return optimizer.param_groups[0].get(name) if usual is None else usual


def _set(group: Group, name: str, value: Any) -> None:
    if isinstance(group[name], Tensor):
        group[name].fill_(value)  # in place: compiled code holds on to it
    else:
        group[name] = tuple(value) if isinstance(group[name], tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
