"""The figures of a plan as plain data, and the time of a step from them. They come from the process that traced it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lockstep.config.strategy import BATCH_AXES
from lockstep.planner.devices import Target
from lockstep.planner.ledger import Books, Peak, kind_of

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
    largest: list[Tensor]
    flops: int
    bytes: int
    work: list[Work]
    collectives: list[Collective]
    timeline: list[dict[str, int]]
    phases: list[tuple[str, int]]  # each with the event at which it began
    seconds: float  # that tracing took
    events: int = 0  # that the timeline is thinned from, and phases count
    mesh: dict[str, int] = field(default_factory=dict)  # axes in the order of ranks, the last running fastest
    axes: list[str] = field(default_factory=list)  # that there are rules for, in the config or by the task
    host_bytes: int = 0  # that the rank keeps in the memory of its host (strategy.offload)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Step:
        return cls(
            **{
                **raw,
                "largest": [Tensor(**each) for each in raw["largest"]],
                "work": [Work(**each) for each in raw["work"]],
                "collectives": [Collective(**each) for each in raw["collectives"]],
                "phases": [(name, at) for name, at in raw["phases"]],
            }
        )


def largest(peak: Peak, books: Books) -> list[Tensor]:
    return [
        Tensor(held, kind_of(each, books), list(each.shape), each.dtype, each.operation, each.line)
        for each, held in peak.largest
    ]


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
    found: dict[tuple[str, Axis], list[int]] = {}
    everybody = Axis("all ranks", world_size, world_size)
    for each in books.collectives[start:]:
        key = (each.name.rpartition(".")[2].strip("_"), axes.get(each.group, everybody))
        total = found.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += each.bytes
    return [Collective(name, *axis, count, size) for (name, axis), (count, size) in found.items()]


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
    def compute(self) -> float:
        return self.products + self.traffic

    @property
    def step(self) -> float:
        return max(self.compute, self.beside) + self.between


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
        exchanged[one.axis in BATCH_AXES or one.axis == "all ranks"] += seconds(one, target)
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
