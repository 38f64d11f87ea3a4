"""Resuming with another config or other data: applies new optimizer settings, and compares lengths of datasets.

Restoring brings back the param groups as they were saved, so that new settings of the config would have no effect.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.engine.models import MATCH
from lockstep.errors import ConfigError
from lockstep.tasks.parameters import text

logger = logging.getLogger(__name__)

Group = dict[str, Any]


class OptimizerArguments:
    """The config's arguments of the optimizer, kept in every checkpoint."""

    def __init__(
        self, current: Mapping[str, Any] | None, groups: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`groups` has the arguments of parameter groups, by the text of their patterns."""
        self.current = None if current is None else dict(current)
        self.groups = {match: dict(each) for match, each in (groups or {}).items()}
        self.saved: Mapping[str, Any] | None = None  # of the checkpoint, once restored
        self.saved_groups: Mapping[str, Mapping[str, Any]] = {}

    @classmethod
    def of(cls, optimizer: OptimizerSettings | None) -> OptimizerArguments:
        if optimizer is None:
            return cls(None)
        return cls(optimizer.arguments, {text(each): each.arguments for each in optimizer.groups or ()})

    def state_dict(self) -> dict[str, Any]:
        return {"arguments": self.current, "groups": self.groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.saved, self.saved_groups = state["arguments"], state.get("groups", {})

    def apply(self, optimizer: Optimizer, scheduler: Any) -> list[str]:
        """Brings a restored optimizer to the config's arguments. Returns what was changed."""
        return apply_changes(optimizer, scheduler, self.saved, self.current, self.saved_groups, self.groups)


def apply_changes(
    optimizer: Optimizer,
    scheduler: Any,
    saved: Mapping[str, Any] | None,
    current: Mapping[str, Any] | None,
    saved_groups: Mapping[str, Mapping[str, Any]] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Brings a restored optimizer and its scheduler to the config's arguments. Returns what was changed.

    `saved` are the arguments under which the checkpoint was made, `current` those of now; both are None where the
    config names no optimizer. Those of groups come before them. All ranks do the same.
    """
    if saved is None or current is None:
        return []
    changes: dict[str, None] = {}
    for match in (None, *(groups or {})):
        numbers = [number for number, each in enumerate(optimizer.param_groups) if each.get(MATCH) == match]
        before, now = (saved_groups or {}).get(match or "", {}), (groups or {}).get(match or "", {})
        if numbers:
            part = _Part(optimizer, scheduler, numbers, match, {*before, *now})
            changes |= dict.fromkeys(part.apply({**saved, **before}, {**current, **now}))
    return list(changes)


@dataclass(frozen=True)
class _Part:
    """Param groups of an optimizer with the same arguments, by their numbers; `own` are those that a pattern has."""

    optimizer: Optimizer
    scheduler: Any
    numbers: Sequence[int]
    match: str | None
    own: set[str]

    def called(self, name: str) -> str:
        return f"optimizer.groups ({self.match}).{name}" if name in self.own else f"optimizer.{name}"

    @property
    def groups(self) -> list[Group]:
        return [self.optimizer.param_groups[number] for number in self.numbers]

    def apply(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
        changes = []
        for name in dict.fromkeys([*saved, *current]):
            if _plain(saved.get(name)) == _plain(current.get(name)):
                continue
            before = saved.get(name, _default(self.optimizer, name))
            after = current.get(name, self.optimizer.defaults.get(name))
            if after is None or not all(name in group for group in self.groups):
                raise ConfigError(
                    f"{self.called(name)}: {before!r} -> {current.get(name)!r}: {type(self.optimizer).__name__} does "
                    "not keep it where it can be changed. Take the change back, or start a new run"
                )
            if name == "lr":
                changes.append(self._change_rate(float(before), float(after)))
            else:
                # Groups with another value than the config's have it from user code.
                for group in self.groups:
                    if _plain(group[name]) == _plain(before):
                        _set(group, name, after)
                changes.append(f"{self.called(name)}: {before!r} -> {after!r} from here on")
        return changes

    def _change_rate(self, before: float, after: float) -> str:
        """Scales what a schedule has made of the old rate to the new one."""
        schedulers = list(_all_of(self.scheduler))
        floor = _floor(schedulers, before, after)
        for group in self.groups:
            _set(group, "lr", _moved(float(group["lr"]), before, after, floor))
            if "initial_lr" in group:
                _set(group, "initial_lr", _moved(float(group["initial_lr"]), before, after, floor))
        for each in schedulers:
            if hasattr(each, "base_lrs"):
                each.base_lrs = [
                    _moved(float(rate), before, after, floor) if number in self.numbers else rate
                    for number, rate in enumerate(each.base_lrs)
                ]
            if hasattr(each, "_last_lr"):
                each._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        change = f"{self.called('lr')}: {before:g} -> {after:g} from here on"
        if schedulers:
            now = float(self.groups[0]["lr"])
            change += f"; the schedule of {type(self.scheduler).__name__} continues from there, with {now:.6g} now"
        return change


def _moved(rate: float, before: float, after: float, floor: float) -> float:
    """Scales a rate from `before` to `after`, both above the floor that a schedule falls to."""
    return after if rate == before else floor + (rate - floor) * (after - floor) / (before - floor)


def _floor(schedulers: list[Any], before: float, after: float) -> float:
    """Returns the floor of a schedule; refuses one that does not scale with the rate."""
    leaves = [each for each in schedulers if not hasattr(each, "_schedulers")]
    for each in leaves:
        name = type(each).__name__
        if isinstance(each, (OneCycleLR, CyclicLR)):
            raise _refused(before, after, f"{name} has its own rates, whatever the optimizer's is")
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
    if scheduler is not None:
        yield scheduler
        for each in getattr(scheduler, "_schedulers", ()):
            yield from _all_of(each)


def _refused(before: float, after: float, why: str) -> ConfigError:
    return ConfigError(f"optimizer.lr: {before:g} -> {after:g}: {why}. Take the change back, or start a new run")


def _default(optimizer: Optimizer, name: str) -> Any:
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


class Lengths:
    """The lengths of datasets that no cursor compares: those of a split, of validation and of test data."""

    def __init__(self, split: int | None, own: Mapping[str, int]) -> None:
        """`split` has the examples that the config splits at random; `own` those of the task's other datasets."""
        self._split, self._own = split, dict(own)

    def state_dict(self) -> dict[str, Any]:
        return {"split": self._split, "own": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = state["split"]
        if None not in (before, self._split) and before != self._split:
            raise ConfigError(
                f"train_data() has {self._split} examples, and had {before} when the checkpoint was made: data.split "
                "would draw other examples for training and for validation, so that some that were trained on would be "
                f"validated on. Give it the {before} examples back, or start a new run"
            )
        for name, count in self._own.items():
            if state["own"].get(name, count) != count:
                logger.warning(
                    "%s has %d examples, and had %d when the checkpoint was made: its metrics before and after are not "
                    "of the same data", _method(name), count, state["own"][name],
                )  # fmt: skip


def _method(name: str) -> str:
    kind, _, one = name.partition("/")
    return f"{kind}_data()[{one!r}]" if one else f"{kind}_data()"
