"""`lockstep plan --search`: the ways to distribute a run over a target, and the fastest that fits.

A trace takes seconds, so there are at most `_MOST`, and some ways are skipped:

- A way whose weights, gradients and optimizer state alone do not fit is tried neither with accumulation nor with
  activation checkpointing, and ways that keep as much of the model on a device are not tried at all.
- Accumulation and activation checkpointing are never faster: they are not tried if the way fits without them, or if it
  is slower without them than another that fits.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.load import to_yaml, with_values
from lockstep.config.schema import RunConfig
from lockstep.config.strategy import BATCH_AXES, DATA_AXIS, REPLICA_AXIS, dp_size
from lockstep.errors import ConfigError, LockstepError
from lockstep.planner.devices import Target
from lockstep.planner.figures import Step
from lockstep.planner.plan import GIB, Plan

_KEPT = ("blocks", "param_dtype", "offload")  # of the config's own strategy, where another mesh spreads the model
_STAYS = ("weights", "optimizer", "averages", "gradients")  # whatever the batch
_MOST = 40  # traces
_MOST_AXES = 2  # that are not the batch's, at once


@dataclass(frozen=True)
class Spread:
    """A way to distribute the model. In a family, each keeps more of it on a device than the one before."""

    title: str
    strategy: Mapping[str, Any]
    dp_size: int  # of a batch
    family: str


@dataclass(frozen=True)
class Way:
    title: str
    values: Mapping[str, Any]  # of the config
    plan: Plan | None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def rank(self) -> tuple[int, float]:
        if self.plan is None:
            return (2, 0.0)
        return (0 if self.plan.fits else 1, self.plan.estimate.step)


def spreads(config: RunConfig, target: Target, axes: Sequence[str]) -> Iterator[Spread]:
    """Yields every mesh and strategy for the target, unsharded ones first. `axes` are those with sharding rules."""
    count, own = target.count, config.strategy
    kept = {name: value for name in _KEPT if (value := getattr(own, name)) not in (None, "float32", False)}
    rules = {pattern: rule.model_dump(mode="json") for pattern, rule in own.shard.items()}

    def over(title: str, type: str, mesh: dict[str, int], family: str, rules: dict[str, Any]) -> Spread:
        strategy = {"type": type, "mesh": mesh, **({"shard": rules} if rules else {}), **kept}
        return Spread(title, strategy, dp_size(mesh), family)

    if count == 1:
        yield Spread("whole", {"type": "auto"}, 1, "whole")
        return
    its_own = own.model_dump(mode="json", exclude_defaults=True) if own.type in ("auto", "ddp") else {}
    yield Spread("ddp", {**its_own, "type": "ddp"}, count, "ddp")
    yield over("fsdp", "fsdp", {DATA_AXIS: count}, "fsdp", {})
    for replicas in _divisors(count)[1:-1]:
        mesh = {REPLICA_AXIS: replicas, DATA_AXIS: count // replicas}
        yield over(f"hsdp {replicas} x {count // replicas}", "hsdp", mesh, "fsdp", {})
    for sizes in _sizes(axes, count, target.per_host):
        data = count // math.prod(sizes.values())
        text = " x ".join(f"{size} {axis}" for axis, size in sizes.items())
        mine = _rules_of(rules, sizes)
        if data > 1:
            yield over(f"fsdp {data} x {text}", "fsdp", {DATA_AXIS: data, **sizes}, f"fsdp x {text}", mine)
        yield over(f"{data} x {text}", "tensor", {DATA_AXIS: data, **sizes}, f"fsdp x {text}", mine)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _sizes(axes: Sequence[str], count: int, per_host: int) -> Iterator[dict[str, int]]:
    """Axes along which ranks wait for each other stay within a host."""
    options = [each for each in _divisors(count) if each <= per_host]
    for sizes in itertools.product(options, repeat=len(axes[:_MOST_AXES])):
        used = {axis: size for axis, size in zip(axes, sizes, strict=False) if size > 1}
        if used and count % math.prod(sizes) == 0 and math.prod(sizes) <= per_host:
            yield used


def _rules_of(rules: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the rules of the config whose axes the mesh has."""

    def has(entry: Any) -> bool:
        named = [entry] if isinstance(entry, str) else entry or []
        return all(axis in sizes or axis == DATA_AXIS for axis in named)

    return {pattern: rule for pattern, rule in rules.items() if rule["mesh"] is None and all(map(has, rule["spec"]))}


@dataclass
class _Search:
    config: RunConfig
    target: Target
    make: Callable[[Sequence[str]], Plan]
    note: Callable[[str], None]
    traces: int = 0
    found: list[Way] = field(default_factory=list)
    too_much: dict[str, str] = field(default_factory=dict)  # by family: the first whose model alone does not fit

    def all_of(self, spread: Spread) -> None:
        """Tries a way as it is, then with as few micro-batches as fit, then with activation checkpointing."""
        if spread.family in self.too_much:
            self._leave_out(spread.title, f"not traced: has no less of the model than {self.too_much[spread.family]}")
            return
        first = self._try(spread, None, 1)
        if first is None or first.fits:
            return
        fastest = min((each for each in self.found if each.fits), key=lambda each: each.rank, default=None)
        if fastest is not None and fastest.rank[1] <= first.estimate.step:
            self._leave_out(
                f"{spread.title}, in parts or activation checkpointing",
                f"not traced: no faster than {fastest.title}",
            )
            return
        parts = self._in_parts(spread, None, first, math.inf)
        if spread.family not in self.too_much:
            activation_checkpointing = self.config.train.activation_checkpointing or "blocks"
            again = self._try(spread, activation_checkpointing, 1)
            if again is not None:
                self._in_parts(spread, activation_checkpointing, again, parts or math.inf)

    def _in_parts(
        self, spread: Spread, activation_checkpointing: str | None, plan: Plan, fewer_than: float
    ) -> int | None:
        """Returns how many micro-batches fit; `plan` is for one."""
        parts: int | None = 1
        while parts is not None and not plan.fits:
            if _lower_bound(plan.step, math.inf) > plan.capacity:
                self.too_much.setdefault(spread.family, spread.title)
                return None
            parts = self._next(spread, plan, parts)
            if parts is None or parts >= fewer_than:
                return None
            tried = self._try(spread, activation_checkpointing, parts)
            if tried is None:
                return None
            plan = tried
        return parts

    def _next(self, spread: Spread, plan: Plan, done: int) -> int | None:
        """Returns the fewest micro-batches that may fit and divide the batch of a device."""
        examples = self.config.train.batch_size // spread.dp_size
        for parts in _divisors(examples):
            if parts >= 2 * done and _lower_bound(plan.step, parts / done) <= plan.capacity:
                return parts
        return None

    def _try(self, spread: Spread, activation_checkpointing: str | None, parts: int) -> Plan | None:
        title = spread.title + ", activation checkpointing" * bool(activation_checkpointing)
        title += f", in {parts} parts" * (parts > 1)
        if self.traces >= _MOST:
            self._leave_out(title, f"not traced: {_MOST} are traced at most")
            return None
        self.note(title)
        self.traces += 1
        values = {
            "strategy": spread.strategy,
            "train.activation_checkpointing": activation_checkpointing,
            "train.accumulate": parts,
        }
        try:
            made = self.make([f"{path}={json.dumps(value)}" for path, value in values.items()])
            self.found.append(Way(title, values, made))
        except LockstepError as error:  # refused, or beyond tracing: others may not be
            self.found.append(Way(title, values, None, str(error)))
        return self.found[-1].plan

    def _leave_out(self, title: str, why: str) -> None:
        self.found.append(Way(title, {}, None, why))


def _lower_bound(step: Step, parts: float) -> float:
    """Returns the least memory with this many times more micro-batches."""
    stays = sum(step.by_kind.get(kind, 0) for kind in _STAYS)
    return stays + sum(size for kind, size in step.by_kind.items() if kind not in (*_STAYS, "communication")) / parts


def search(
    config: RunConfig,
    target: Target,
    make: Callable[[Sequence[str]], Plan],
    note: Callable[[str], None] = lambda title: None,
) -> list[Way]:
    """Returns all ways, the fastest that fits first; `note` is called before each trace."""
    at_work = _Search(config, target, make, note)
    own = [axis for axis in config.strategy.mesh or {} if axis not in BATCH_AXES]
    for spread in spreads(config, target, []):
        at_work.all_of(spread)
    # The axes that a task has rules for are known to who has made the task.
    ruled = next((each.plan.step.axes for each in at_work.found if each.plan is not None), own)
    known = {spread.title for spread in spreads(config, target, [])}
    for spread in spreads(config, target, ruled or own):
        if spread.title not in known:
            at_work.all_of(spread)
    return sorted(at_work.found, key=lambda each: each.rank)


def lines(found: Sequence[Way]) -> Iterator[str]:
    width = max(len(each.title) for each in found)
    yield f"{'':<{width}}  {'per device':>10}  {'at least':>10}"
    for each in found:
        if each.plan is None:
            yield f"{each.title:<{width}}  {each.why_not.splitlines()[0]}"
            continue
        text = f"{each.plan.step.peak / GIB:6.3g} GiB  {each.plan.estimate.step * 1e3:7.3g} ms"
        yield f"{each.title:<{width}}  {text}{'' if each.plan.fits else '  does not fit'}"


def plain(found: Sequence[Way]) -> list[dict[str, Any]]:
    return [
        {
            "way": one.title,
            "values": one.values,
            "why_not": one.why_not or None,
            "plan": one.plan.plain() if one.plan is not None else None,
        }
        for one in found
    ]


def write(config: RunConfig, best: Way, target: Target, file: Path) -> None:
    """Writes the config with the best way; `processes` counts all hosts."""
    # On a slice the hosts count their own processes.
    there = {"processes": target.count} if target.slice is None else {"runtime": "xla", "processes": "auto"}
    values = {**best.values, **there}
    chosen = with_values(config, values).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    text = f"# Found by lockstep plan --search for {target.title}: {best.title}.\n" + to_yaml(chosen)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"--write {file}: {error.strerror}") from None
