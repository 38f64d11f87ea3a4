"""`lockstep plan --search`: the ways to distribute a run over a target, and the fastest that fits.

A trace takes seconds, so there are at most `_MOST`. What fits is not also tried with micro-batches or activation
checkpointing, which are never faster; a number of micro-batches that cannot fit is not tried either.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import to_yaml, with_values
from lockstep.config.schema import RunConfig
from lockstep.config.strategy import BATCH_AXES, CONTEXT_AXIS, DATA_AXIS, REPLICA_AXIS, dp_size
from lockstep.errors import ConfigError, LockstepError
from lockstep.planner.devices import Target
from lockstep.planner.plan import Plan, Step
from lockstep.shown import binary_size

# Of the config's own strategy, where another mesh spreads the model.
_KEPT = ("blocks", "param_dtype", "reduce_dtype", "reshard_after_forward", "offload")
_STAYS = ("weights", "optimizer", "averages", "gradients")  # whatever the batch
_MOST = 40  # traces
_MOST_AXES = 2  # that are not the batch's, at once


@dataclass(frozen=True)
class Spread:
    """A way to distribute the model."""

    title: str
    strategy: Mapping[str, Any]
    dp_size: int  # of a batch


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


def _over_the_batch(config: RunConfig, target: Target) -> Iterator[Spread]:
    """Yields the strategies that split the batch alone, unsharded ones first."""
    count, own = target.count, config.strategy
    if count == 1:
        yield Spread("whole", {"type": "auto"}, 1)
        return
    its_own = own.model_dump(mode="json", exclude_defaults=True) if own.type in ("auto", "ddp") else {}
    yield Spread("ddp", {**its_own, "type": "ddp"}, count)
    yield _over(config, "fsdp", "fsdp", {DATA_AXIS: count})
    for replicas in _divisors(count)[1:-1]:
        mesh = {REPLICA_AXIS: replicas, DATA_AXIS: count // replicas}
        yield _over(config, f"hsdp {replicas} x {count // replicas}", "hsdp", mesh)


def _over_axes(config: RunConfig, target: Target, axes: Sequence[str]) -> Iterator[Spread]:
    """Yields the meshes over axes with sharding rules, each with fsdp and without."""
    for sizes in _sizes(axes, target.count, target.per_host):
        data = target.count // math.prod(sizes.values())
        text = " x ".join(f"{size} {axis}" for axis, size in sizes.items())
        if data > 1:
            yield _over(config, f"fsdp {data} x {text}", "fsdp", {DATA_AXIS: data, **sizes})
        yield _over(config, f"{data} x {text}", "tensor", {DATA_AXIS: data, **sizes})


def _over_sequences(config: RunConfig, target: Target) -> Iterator[Spread]:
    """Yields the meshes that split sequences, each within hosts; TPUs have none."""
    for size in _divisors(target.count)[1:]:
        if size <= target.per_host and target.slice is None:
            mesh = {DATA_AXIS: target.count // size, CONTEXT_AXIS: size}
            yield _over(config, f"fsdp {mesh[DATA_AXIS]} x {size} {CONTEXT_AXIS}", "fsdp", mesh)


def _over(config: RunConfig, title: str, type: str, mesh: dict[str, int]) -> Spread:
    own = config.strategy
    kept = {name: value for name in _KEPT if (value := getattr(own, name)) not in (None, "float32", False)}
    written = {} if set(mesh) <= set(BATCH_AXES) else own.shard
    rules = _rules_of({pattern: rule.model_dump(mode="json") for pattern, rule in written.items()}, mesh)
    return Spread(title, {"type": type, "mesh": mesh, **({"shard": rules} if rules else {}), **kept}, dp_size(mesh))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _sizes(axes: Sequence[str], count: int, per_host: int) -> Iterator[dict[str, int]]:
    """Axes along which ranks wait for each other stay within a host."""
    options = [each for each in _divisors(count) if each <= per_host]
    for sizes in itertools.product(options, repeat=len(axes[:_MOST_AXES])):
        used = {axis: size for axis, size in zip(axes, sizes, strict=False) if size > 1}
        if used and count % math.prod(sizes) == 0 and math.prod(sizes) <= per_host:
            yield used


def _rules_of(rules: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
    """Returns the rules of the config whose axes the mesh has."""

    def has(entry: Any) -> bool:
        return all(axis in mesh for axis in ([entry] if isinstance(entry, str) else entry or []))

    return {pattern: rule for pattern, rule in rules.items() if rule["mesh"] is None and all(map(has, rule["spec"]))}


def search(
    config: RunConfig,
    target: Target,
    make: Callable[[Sequence[str]], Plan],
    note: Callable[[str], None] = lambda title: None,
) -> list[Way]:
    """Returns all ways, the fastest that fits first; `note` is called before each trace."""
    found: list[Way] = []

    def tried(spread: Spread, activation_checkpointing: str | None, parts: int) -> Plan | None:
        title = spread.title + ", activation checkpointing" * bool(activation_checkpointing)
        title += f", in {parts} parts" * (parts > 1)
        values = {
            "strategy": spread.strategy,
            "train.activation_checkpointing": activation_checkpointing,
            "train.accumulate": parts,
        }
        if sum(bool(each.values) for each in found) >= _MOST:
            found.append(Way(title, {}, None, f"not traced: {_MOST} are traced at most"))
            return None
        note(title)
        try:
            made = make([f"{path}={json.dumps(value)}" for path, value in values.items()])
            found.append(Way(title, values, made))
        except LockstepError as error:  # refused, or beyond tracing: others may not be
            found.append(Way(title, values, None, str(error)))
        return found[-1].plan

    def every_way(spread: Spread) -> None:
        """Tries a way as it is, in as few micro-batches as fit, then in fewer with activation checkpointing."""
        sizes = _divisors(config.train.batch_size // spread.dp_size)
        for activation_checkpointing in (None, config.train.activation_checkpointing or "blocks"):
            parts, plan = 1, tried(spread, activation_checkpointing, 1)
            while plan is not None and not plan.fits:
                if _lower_bound(plan.step, math.inf) > plan.capacity:
                    return
                parts = _more_parts(plan, parts, sizes)
                plan = tried(spread, activation_checkpointing, parts) if parts else None
            if parts == 1:  # it fits as it is, or is refused
                return
            sizes = [each for each in sizes if not parts or each < parts]

    for spread in _over_the_batch(config, target):
        every_way(spread)
    # The axes that a task has rules for are known to who has made the task.
    ruled = next((each.plan.step.axes for each in found if each.plan is not None), [])
    own = [axis for axis in config.strategy.mesh or {} if axis not in (*BATCH_AXES, CONTEXT_AXIS)]
    for spread in _over_axes(config, target, ruled or own):
        every_way(spread)
    if config.strategy.splits_sequences or not any(each.fits for each in found):
        for spread in _over_sequences(config, target):
            every_way(spread)
    return sorted(found, key=lambda each: each.rank)


def _more_parts(plan: Plan, parts: int, sizes: Sequence[int]) -> int:
    """Returns the fewest micro-batches that may fit, 0 where none do; `plan` is for so many parts."""
    for each in sizes:
        if each >= 2 * parts and _lower_bound(plan.step, each / parts) <= plan.capacity:
            return each
    return 0


def _lower_bound(step: Step, parts: float) -> float:
    """Returns the least memory with this many times more micro-batches."""
    stays = sum(step.by_kind.get(kind, 0) for kind in _STAYS)
    return stays + sum(size for kind, size in step.by_kind.items() if kind not in (*_STAYS, "communication")) / parts


def lines(found: Sequence[Way]) -> Iterator[str]:
    width = max(len(each.title) for each in found)
    yield f"{'':<{width}}  {'per device':>10}  {'at least':>10}"
    for each in found:
        if each.plan is None:
            yield f"{each.title:<{width}}  {each.why_not.splitlines()[0]}"
            continue
        text = f"{binary_size(each.plan.step.peak):>10}  {each.plan.estimate.step * 1e3:7.3g} ms"
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
