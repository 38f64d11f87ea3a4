"""How long a step takes at least: an estimate from what a device can do at best, by its datasheet.

Products of matrices take the longer of their arithmetic and their traffic, all else its traffic:

    compute = sum over products of max(FLOPs / peak, bytes / bandwidth) + sum over the rest of bytes / bandwidth

What ranks along the axes of a batch exchange goes on beside the computing; along the others it is waited for:

    step = max(compute, exchange over data and replica) + exchange over the other axes

where a rank sends (n - 1) / n of what is gathered or scattered among n, and twice that of what is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.mesh import BATCH_AXES
from lockstep.planner.devices import Target
from lockstep.planner.figures import Collective, Step

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Estimate:
    """Seconds, each."""

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
    """FLOP/s at best. What a device has no figure for, it computes as float32."""
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
