"""`lockstep plan --search`: the ways of spreading a run over a target, and which of those that fit is the fastest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import to_yaml, with_values
from lockstep.config.mesh import BATCH_AXES, DATA_AXIS, REPLICA_AXIS
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.planner.devices import Target
from lockstep.planner.plan import GIB, Plan

_KEPT = ("blocks", "gather")  # of the config's own strategy, where another spreads the model
_PARTS = (1, 2, 4)  # in which a device may compute its share of a batch


@dataclass(frozen=True)
class Way:
    """What to change in a config."""

    title: str
    values: Mapping[str, Any]

    @property
    def overrides(self) -> list[str]:
        return [f"{path}={json.dumps(value)}" for path, value in self.values.items()]


def ways(config: RunConfig, target: Target) -> Iterator[Way]:
    """Every way that multiplies out, whole models first, and what keeps the most in memory first."""
    for (name, strategy), recompute in itertools.product(_spreads(config, target), (None, "blocks")):
        title = f"{name}, recompute" if recompute else name
        yield Way(title, {"strategy": strategy, "train.recompute": recompute})


def _spreads(config: RunConfig, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    count, own = target.count, config.strategy
    kept = {name: value for name in _KEPT if (value := getattr(own, name)) not in (None, "float32")}
    yield ("ddp" if count > 1 else "whole"), {"type": "ddp" if count > 1 else "auto"}
    if count > 1:
        yield "fsdp", {"type": "spmd", "preset": "fsdp", "mesh": {DATA_AXIS: count}, **kept}
    if target.hosts > 1 and count % target.hosts == 0:
        mesh = {REPLICA_AXIS: target.hosts, DATA_AXIS: count // target.hosts}
        yield f"hsdp {mesh[REPLICA_AXIS]} x {mesh[DATA_AXIS]}", {"type": "spmd", "preset": "hsdp", "mesh": mesh, **kept}
    others = [axis for axis in own.mesh or {} if axis not in BATCH_AXES]
    if len(others) == 1:  # the config has rules for it
        rules = {pattern: rule.model_dump(mode="json") for pattern, rule in own.shard.items()}
        for size in (2, 4, 8):
            if count % size == 0 and size <= target.device.per_host:
                mesh = {DATA_AXIS: count // size, others[0]: size}
                spread = {"type": "spmd", "mesh": mesh, "preset": own.preset or "tensor", "shard": rules, **kept}
                yield f"{mesh[DATA_AXIS]} x {size} {others[0]}", spread


@dataclass(frozen=True)
class Tried:
    way: Way
    plan: Plan | None
    why_not: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        return (self.plan is None or not self.plan.fits, self.plan.estimate.step if self.plan is not None else 0.0)


def search(config: RunConfig, target: Target, make: Callable[[Sequence[str]], Plan]) -> list[Tried]:
    """All ways, the fastest that fits first. One that does not fit is tried in smaller parts of a batch."""
    found = []
    for way in ways(config, target):
        for parts in _PARTS:
            smaller = Way(f"{way.title}, in {parts} parts", {**way.values, "train.accumulate": parts})
            chosen = way if parts == 1 else smaller
            try:
                found.append(Tried(chosen, make(chosen.overrides)))
            except ConfigError as error:
                found.append(Tried(chosen, None, str(error)))
                break
            plan = found[-1].plan
            if plan is None or plan.fits or config.train.batch_size < target.count * parts * 2:
                break
    return sorted(found, key=lambda each: each.rank)


def lines(found: Sequence[Tried]) -> Iterator[str]:
    width = max(len(each.way.title) for each in found)
    yield f"{'':<{width}}  {'per device':>10}  {'at least':>10}"
    for each in found:
        if each.plan is None:
            yield f"{each.way.title:<{width}}  {each.why_not.splitlines()[0]}"
            continue
        told = f"{each.plan.step.peak / GIB:6.3g} GiB  {each.plan.estimate.step * 1e3:7.3g} ms"
        yield f"{each.way.title:<{width}}  {told}{'' if each.plan.fits else '  does not fit'}"


def write(config: RunConfig, best: Tried, target: Target, file: Path) -> None:
    """The config with what the search found, as one that trains."""
    values = {**best.way.values, **({"processes": target.count} if target.hosts == 1 else {})}
    chosen = with_values(config, values).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    text = f"# Found by lockstep plan --search for {target.title}: {best.way.title}.\n" + to_yaml(chosen)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--write {file}: {error.strerror}") from None
