"""What a plan says, as plain data: it comes from the process that traced the step, and goes into tables and JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lockstep.planner.ledger import Books, Peak, kind_of

KINDS = ("weights", "gradients", "optimizer", "averages", "activations", "temporaries", "communication", "batch")
_SHOWN_EVENTS = 400  # in the picture of a step


@dataclass(frozen=True)
class Tensor:
    """One of the largest at the peak."""

    bytes: int
    kind: str
    shape: list[int]
    dtype: str
    operation: str
    line: str


class Axis(NamedTuple):
    """Of a mesh: the ranks of one line along it, and how many places they are spread over, with those between them."""

    name: str
    ranks: int
    span: int


@dataclass(frozen=True)
class Collective:
    """All of one kind, along one axis, in a step."""

    name: str
    axis: str
    ranks: int
    span: int
    count: int
    bytes: int


@dataclass(frozen=True)
class Work:
    """Operations of a step that are alike for a roofline: their type of number, and what bounds them."""

    dtype: str
    flops: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

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
    uneven: list[str]  # sizes of matrices that are no multiple of 8, with a line that has them
    timeline: list[dict[str, int]]
    phases: list[tuple[str, int]]
    seconds: float  # that tracing took

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
    """By type of number and by how many operations a byte takes: what a roofline needs to know of them."""
    found: dict[tuple[str, bool], list[int]] = {}
    single: list[Work] = []
    for each in books.operations[start:]:
        if each.flops:
            single.append(Work(each.dtype, each.flops, each.bytes, 1))
        else:
            total = found.setdefault((each.dtype, False), [0, 0])
            total[0] += each.bytes
            total[1] += 1
    alike: Counter[tuple[str, int, int]] = Counter((each.dtype, each.flops, each.bytes) for each in single)
    products = [Work(dtype, flops, size, count) for (dtype, flops, size), count in alike.items()]
    return products + [Work(dtype, 0, size, count) for (dtype, _), (size, count) in found.items() if size]


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
    """As many points as a picture has room for; the peak is one of them."""
    if len(timeline) <= _SHOWN_EVENTS:
        return [now for _, now in timeline]
    width = len(timeline) / _SHOWN_EVENTS
    kept = []
    for number in range(_SHOWN_EVENTS):
        part = timeline[int(number * width) : int((number + 1) * width)]
        highest = max(part, key=lambda each: (each[0] == peak_at, sum(each[1].values())))
        kept.append(highest[1])
    return kept
