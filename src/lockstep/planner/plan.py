"""A plan: whether a config fits a target, and what it needs there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from lockstep.config.strategy import BATCH_AXES, CONTEXT_AXIS, dp_size
from lockstep.errors import ConfigError, LockstepError
from lockstep.planner.devices import Target
from lockstep.planner.ledger import Books
from lockstep.shown import binary_size, scaled, size

KINDS = ("weights", "gradients", "optimizer", "averages", "activations", "temporaries", "communication", "batch")
_SHOWN_EVENTS = 400  # in the picture of a step


@dataclass(frozen=True)
class Tensor:
    bytes: int
    kind: str
    shape: list[int]
    dtype: str
    operation: str
    line: str


class Axis(NamedTuple):
    """An axis of a mesh: the ranks of one line along it, and the range of ranks that the line spans."""

    name: str
    ranks: int
    span: int


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind along one axis in a step."""

    name: str
    axis: str
    ranks: int
    span: int
    count: int
    bytes: int
    of_gradients: bool = False  # of parameters, along `context`: beside the backward pass

    @property
    def title(self) -> str:
        return f"{self.name} of gradients" if self.of_gradients else self.name


@dataclass(frozen=True)
class Work:
    """Operations of a step that are alike for a roofline."""

    dtype: str
    flops: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Step:
    world_size: int
    batch: int  # examples of the whole batch
    examples: int | None  # of an epoch; of a stream nobody knows
    parameters: int
    weights_bytes: int  # of all ranks together, as checkpoints have them
    optimizer_bytes: int
    peak: int
    phase: str
    by_kind: dict[str, int]
    seconds: float  # that tracing took
    largest: list[Tensor] = field(default_factory=list)
    flops: int = 0
    bytes: int = 0
    work: list[Work] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    timeline: list[dict[str, int]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)  # each with the event at which it began
    events: int = 0  # that the timeline is thinned from, and phases count
    mesh: dict[str, int] = field(default_factory=dict)  # axes in the order of ranks, the last running fastest
    axes: list[str] = field(default_factory=list)  # that there are rules for, in the config or by the task
    host_bytes: int = 0  # that the rank keeps in the memory of its host (strategy.offload)
    notes: list[str] = field(default_factory=list)  # what the plan does not have in it


def work_of(books: Books, start: int) -> list[Work]:
    """Groups products by dtype, FLOPs and bytes, and adds up all others of a dtype."""
    products: Counter[tuple[str, int, int]] = Counter()
    others: dict[str, list[int]] = {}
    for each in books.operations[start:]:
        if each.flops:
            products[each.dtype, each.flops, each.bytes] += 1
        elif each.bytes:
            others.setdefault(each.dtype, []).append(each.bytes)
    found = [Work(dtype, flops, size, count) for (dtype, flops, size), count in products.items()]
    return found + [Work(dtype, 0, sum(sizes), len(sizes)) for dtype, sizes in others.items()]


def collectives_of(books: Books, start: int, axes: dict[str, Axis], world_size: int) -> list[Collective]:
    found: dict[tuple[str, Axis, bool], list[int]] = {}
    everybody = Axis("all ranks", world_size, world_size)
    for each in books.collectives[start:]:
        axis = axes.get(each.group, everybody)
        of_gradients = axis.name == CONTEXT_AXIS and each.by_fully_shard
        key = (each.name.rpartition(".")[2].strip("_"), axis, of_gradients)
        total = found.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += each.bytes
    return [
        Collective(name, *axis, count, size, of_gradients)
        for (name, axis, of_gradients), (count, size) in found.items()
    ]


def thinned(timeline: list[tuple[int, dict[str, int]]], peak_at: int) -> list[dict[str, int]]:
    """Reduces a timeline to the points of a chart, keeping the peak."""
    if len(timeline) <= _SHOWN_EVENTS:
        return [now for _, now in timeline]
    width = len(timeline) / _SHOWN_EVENTS
    kept = []
    for number in range(_SHOWN_EVENTS):
        part = timeline[int(number * width) : int((number + 1) * width)]
        highest = max(part, key=lambda each: (each[0] == peak_at, sum(each[1].values())))
        kept.append(highest[1])
    return kept


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Estimate:
    """The parts of a step in seconds."""

    products: float
    traffic: float
    beside: float  # exchanged while something is computed
    between: float  # exchanged while nothing is

    @property
    def step(self) -> float:
        return max(self.products + self.traffic, self.beside) + self.between


def estimate(step: Step, target: Target, precision: str) -> Estimate:
    bandwidth = target.device.bandwidth * 1e9
    products = traffic = 0.0
    for each in step.work:
        moving = each.bytes / bandwidth
        if each.flops:
            products += each.count * max(each.flops / peak(target, each.dtype, precision), moving)
        else:
            traffic += moving
    exchanged = {True: 0.0, False: 0.0}
    for one in step.collectives:
        is_beside = one.axis in (*BATCH_AXES, "all ranks") or one.of_gradients
        exchanged[is_beside] += seconds(one, target)
    return Estimate(products, traffic, exchanged[True], exchanged[False])


def peak(target: Target, dtype: str, precision: str) -> float:
    """Returns the peak FLOP/s; a dtype without a figure runs as float32."""
    known = target.device.peak
    name = "tf32" if dtype == "float32" and precision == "tf32" else _SHORT.get(dtype, "float32")
    return known.get(name, known.get("float32", min(known.values()))) * 1e12


def seconds(one: Collective, target: Target) -> float:
    if one.ranks < 2:
        return 0.0
    rounds = 2 if "reduce" in one.name and "scatter" not in one.name else 1
    # Ranks of a host have consecutive places; chips of a slice are linked, of the same host or not.
    inside = target.slice is not None or one.span <= target.device.per_host
    speed = target.device.link / 2 if inside else min(target.device.link / 2, target.device.network)
    return rounds * one.bytes * (one.ranks - 1) / one.ranks / (speed * 1e9)


GIB = 2**30
# Kept back for what a process has on a GPU beside its tensors: the driver's context and libraries. On an H200 it was
# 0.82 GiB (benchmarks/plan.py).
_RESERVED = 0.82 * GIB
_LIMIT_SECONDS = 900.0
_PATIENT_SECONDS = 60.0  # for tracing again, to try batch sizes
_TRIES = 3


@dataclass(frozen=True)
class Plan:
    target: Target
    step: Step
    estimate: Estimate
    largest_batch: int | None
    tried: bool  # whether the largest batch was traced, or worked out from this one

    @property
    def capacity(self) -> float:
        return self.target.device.memory * GIB - self.reserved

    @property
    def reserved(self) -> float:
        """A TPU's compiler counts everything itself."""
        return _RESERVED if self.target.slice is None else 0.0

    @property
    def fits(self) -> bool:
        return self.step.peak <= self.capacity

    @property
    def margin(self) -> float:
        return self.capacity - self.step.peak

    def plain(self) -> dict[str, Any]:
        return {
            "target": self.target.title,
            "fits": self.fits,
            "capacity": self.capacity,
            "margin": self.margin,
            "largest_batch": self.largest_batch,
            "largest_batch_was_traced": self.tried,
            "estimate": {**asdict(self.estimate), "step": self.estimate.step},
            **asdict(self.step),
        }


def make(
    config: Path,
    overrides: Sequence[str],
    target: Target,
    precision: str,
    seek_batch: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Traces the config's step for a target; with `seek_batch`, also finds the largest batch that fits.

    `note` is called with what is under way.
    """
    note(f"{target.title}: tracing a step")
    step = traced(config, overrides, target)
    plan = Plan(target, step, estimate(step, target, precision), None, False)
    if not seek_batch:
        return plan

    def peak_of(batch: int) -> int:
        note(f"{target.title}: the largest batch: trying {batch}")
        return traced(config, [*overrides, f"train.batch_size={batch}"], target).peak

    largest, tried = _largest_batch(plan, peak_of)
    return Plan(target, step, plan.estimate, largest, tried)


def _largest_batch(plan: Plan, peak_of: Callable[[int], int]) -> tuple[int | None, bool]:
    """Memory is linear in the batch size: two points predict where it reaches the capacity."""
    step, parts = plan.step, dp_size(plan.step.mesh)
    varies = sum(step.by_kind.get(kind, 0) for kind in ("activations", "temporaries", "batch"))
    fixed = step.peak - varies
    if fixed >= plan.capacity or not varies:
        return None, False
    # With more than an epoch has, a batch would be smaller than it says.
    most = step.examples if step.examples is not None else math.inf
    guess = _multiple(min(step.batch * (plan.capacity - fixed) / varies, most), parts)
    points = {step.batch: step.peak}
    while guess and guess not in points and len(points) <= _TRIES and len(points) * step.seconds <= _PATIENT_SECONDS:
        points[guess] = peak_of(guess)
        (small, low), (large, high) = sorted(points.items())[0], sorted(points.items())[-1]
        slope = (high - low) / (large - small)
        # With validate.batch_size, a batch of validation may need the most: it is the same for all.
        guess = _multiple(min(small + (plan.capacity - low) / slope, most), parts) if slope > 0 else 0
    best = max((batch for batch, peak in points.items() if peak <= plan.capacity), default=0)
    return (best, True) if best and best in (guess, *list(points)[1:]) else (guess or None, False)


def _multiple(batch: float, of: int) -> int:
    return int(batch // of) * of


def traced(config: Path, overrides: Sequence[str], target: Target) -> Step:
    """Traces one step on a target: on fake tensors, or compiled for a slice of TPUs."""
    if target.slice is None:
        return _on_fake_tensors(config, overrides, target.count)
    from lockstep.planner.tpu import engine

    return engine.planned(config, overrides, target.slice)


def _on_fake_tensors(config: Path, overrides: Sequence[str], world_size: int) -> Step:
    """Runs in a separate process, since tracing patches torch."""
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        out = Path(folder) / "step.json"
        arguments = [str(config), str(world_size), str(out), *overrides]
        log, code = run_module("lockstep.planner.step", arguments, _LIMIT_SECONDS, f"{config}: tracing a step")
        found = json.loads(out.read_text(encoding="utf-8")) if code == 0 and out.exists() else None
    if found is None:
        lines = log.strip().splitlines()
        last = lines[-1].removeprefix("[rank0]:").strip()[:300] if lines else "the process ended without output"
        raise NotPlanned(f"{config}: the step cannot be traced: {last}. {kept(log)}")
    if "error" in found:
        raise ConfigError(found["error"])
    return TypeAdapter(Step).validate_python(found)


class NotPlanned(LockstepError):
    """The step could not be traced or compiled."""

    exit_code = 2


def run_module(module: str, arguments: Sequence[str], limit: float, what: str) -> tuple[str, int]:
    """Runs `python -m MODULE` without the variables of a rank or of XLA, and returns its output and exit code."""
    left_out = ("RANK", "WORLD_SIZE", "PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on machines with GPUs and without
    with tempfile.TemporaryFile() as log:
        try:
            code = subprocess.run(
                [sys.executable, "-P", "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, timeout=limit, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotPlanned(f"{what} took more than {limit:g} s") from None
        log.seek(0)
        return log.read().decode(errors="replace"), code


def kept(log: str) -> str:
    """Keeps the output of a process in a temporary file, and returns a sentence that names it."""
    descriptor, file = tempfile.mkstemp(prefix="lockstep-plan-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as out:
        out.write(log)
    return f"All that was said: {file}"


_SHOWN = 10
_WHEN = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step",
         "validation": "validation"}  # fmt: skip


def lines(plan: Plan) -> Iterator[str]:
    step, target = plan.step, plan.target
    verdict = f"{binary_size(abs(plan.margin))} {'left' if plan.fits else 'too much'}"
    yield f"{target.title}: {'fits' if plan.fits else 'DOES NOT FIT'}, {verdict}"
    kept = f", of which {binary_size(plan.reserved)} are kept back for the driver" if plan.reserved else ""
    when = f" in {_WHEN[step.phase]}" if step.phase in _WHEN else ""  # a compiler says nothing of it
    has = binary_size(target.device.memory * GIB)
    yield f"memory per device, at its peak{when}: {binary_size(step.peak)} of {has}{kept}"
    for kind in KINDS:
        if size_of_kind := step.by_kind.get(kind):
            yield f"  {kind:<14}{binary_size(size_of_kind):>12}"
    if step.host_bytes:
        yield f"  {binary_size(step.host_bytes)} more are in the memory of its host (strategy.offload)"
    yield from step.notes
    if step.largest:
        yield "the largest tensors then"
    for each in step.largest[:_SHOWN]:
        shape = " x ".join(map(str, each.shape))
        yield f"  {binary_size(each.bytes):>12}  {each.kind:<13} {shape} {each.dtype}  {each.line or each.operation}"
    if not step.work:
        yield "the compiler makes no program that does not fit: what it would compute and exchange is not known"
        return
    number, prefix = scaled(step.flops / 1e6, 1000, "MGTP")
    done = f"{number:.2f} {prefix}FLOP, {size(step.bytes)} moved"
    yield f"a step of {step.batch} examples, of each device: {done}"
    for one in step.collectives:
        yield f"  {one.title} over {one.axis}: {one.count} of {size(one.bytes)} together"
    guess = plan.estimate
    yield (
        f"at least {guess.step * 1e3:.1f} ms by the datasheet (an estimate): products {guess.products * 1e3:.1f}, "
        f"other traffic {guess.traffic * 1e3:.1f}, exchanged beside it {guess.beside * 1e3:.1f}, waited for "
        f"{guess.between * 1e3:.1f}"
    )
    if plan.largest_batch:
        how = "traced" if plan.tried else "worked out from this one, not traced"
        left = math.inf if step.examples is None else step.examples - plan.largest_batch
        how += ", as many as an epoch has" if left < dp_size(step.mesh) else ""
        yield f"largest batch that fits: {plan.largest_batch} ({how})"
