"""Resuming with another config or other data: applies new optimizer settings, and compares the length of a split.

Restoring brings back the param groups as they were saved, so that new settings of the config would have no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.engine.models import MATCH
from lockstep.errors import ConfigError
from lockstep.strategy.combined import parts_of
from lockstep.tasks.parameters import OTHERS, text


class OptimizerArguments:
    """The config's arguments of the optimizer, kept in every checkpoint."""

    def __init__(self, optimizer: OptimizerSettings | None) -> None:
        self._current: dict[str, Any] | None = None if optimizer is None else dict(optimizer.arguments)
        groups = (optimizer.groups or ()) if optimizer is not None else ()
        self._groups = {text(each): dict(each.arguments) for each in groups}
        if optimizer is not None and optimizer.others is not None:
            self._groups[OTHERS] = dict(optimizer.others.arguments)
        self._saved: Mapping[str, Any] | None = None  # of the checkpoint, once restored
        self._saved_groups: Mapping[str, Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"arguments": self._current, "groups": self._groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved, self._saved_groups = state["arguments"], state["groups"]

    def apply(self, optimizer: Optimizer, scheduler: Any) -> list[str]:
        """Brings a restored optimizer and its scheduler to the config's arguments. Returns what was changed."""
        if self._saved is None or self._current is None:
            return []
        changes: dict[str, None] = {}
        for number, group in enumerate(optimizer.param_groups):
            match = group.get(MATCH, "")
            before, now = self._saved_groups.get(match, {}), self._groups.get(match, {})
            own, saved, current = {*before, *now}, {**self._saved, **before}, {**self._current, **now}
            if match == OTHERS:  # another optimizer, with arguments of its own alone
                saved, current = dict(before), dict(now)
            for name in dict.fromkeys([*saved, *current]):
                if _plain(saved.get(name)) != _plain(current.get(name)):
                    of_group = match if match == OTHERS else f"optimizer.groups ({match})"
                    path = f"{of_group}.{name}" if name in own else f"optimizer.{name}"
                    changes[_change(optimizer, scheduler, number, name, path, saved, current)] = None
        return list(changes)


def _change(
    optimizer: Optimizer,
    scheduler: Any,
    number: int,
    name: str,
    path: str,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
) -> str:
    """Changes one setting of one param group. Returns what to say of it."""
    group = optimizer.param_groups[number]
    owner = next(each for each in parts_of(optimizer) if any(one is group for one in each.param_groups))
    kind = type(owner)
    usual = inspect.signature(kind).parameters
    before = saved.get(name, usual[name].default if name in usual else None)
    after = current.get(name, owner.defaults.get(name))
    change = f"{path}: {before!r} -> {current.get(name, after)!r}"
    if after is None or name not in group:
        raise _refused(change, f"{kind.__name__} does not keep it where it can be changed")
    if name != "lr":
        if _plain(group[name]) == _plain(before):  # another value is that of user code
            _set(group, name, after)
        return f"{change} from here on"
    schedulers = list(_all_of(scheduler))
    for each in schedulers:
        scales = hasattr(each, "base_lrs") or hasattr(each, "_schedulers") or isinstance(each, ReduceLROnPlateau)
        if isinstance(each, (OneCycleLR, CyclicLR)) or getattr(each, "eta_min", False) or not scales:
            raise _refused(change, f"{type(each).__name__} has rates that do not scale with it")
    if not before:
        raise _refused(change, "nothing can be scaled from it")
    for key in {"lr", "initial_lr"} & set(group):
        _set(group, key, _scaled(group[key], before, after))
    for each in schedulers:
        if hasattr(each, "base_lrs"):
            each.base_lrs[number] = _scaled(each.base_lrs[number], before, after)
        if hasattr(each, "_last_lr"):
            each._last_lr[number] = float(group["lr"])
    now = f", with {float(group['lr']):.6g} now" if scheduler is not None else ""
    return f"{change} from here on{now}"


def _refused(change: str, why: str) -> ConfigError:
    return ConfigError(f"{change}: {why}. Take the change back, or start a new run")


def _scaled(rate: Any, before: float, after: float) -> float:
    return after if float(rate) == before else float(rate) * after / before


def _all_of(scheduler: Any) -> Iterator[Any]:
    """Yields a scheduler, and those that a sequence or a chain is made of."""
    if scheduler is not None:
        yield scheduler
        for each in getattr(scheduler, "_schedulers", ()):
            yield from _all_of(each)


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], Tensor):
        group[name].fill_(value)  # in place: compiled code holds on to it
    else:
        group[name] = tuple(value) if isinstance(group[name], tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


class SplitLength:
    """The number of examples that the config splits at random, if it does; kept in every checkpoint."""

    def __init__(self, count: int | None) -> None:
        self._count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = state["count"]
        if None not in (before, self._count) and before != self._count:
            raise ConfigError(
                f"train_data() has {self._count} examples, and had {before} when the checkpoint was made: data.split "
                "would draw other examples for training and for validation, so that some that were trained on would be "
                f"validated on. Give it the {before} examples back, or start a new run"
            )
