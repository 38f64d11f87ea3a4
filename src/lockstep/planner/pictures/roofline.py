"""The roofline: what a device can do at best, by how much is computed for a byte; every kind of product is a dot."""

from __future__ import annotations

import math
from html import escape

from lockstep.planner.figures import Work
from lockstep.planner.pictures.chart import BLUE, ORANGE, SIDE, key, line, mark, plot, short
from lockstep.planner.plan import Plan
from lockstep.planner.roofline import peak

_SHOWN = 60  # dots: those that take the most time


def picture(plan: Plan, precision: str) -> str:
    """Nothing, where it is not known what is multiplied."""
    products = [each for each in plan.step.work if each.flops and each.bytes]
    if not products:
        return ""
    bandwidth = plan.target.device.bandwidth * 1e9
    peaks = {each.dtype: peak(plan.target, each.dtype, precision) for each in products}
    taken = {each: each.count * max(each.flops / peaks[each.dtype], each.bytes / bandwidth) for each in products}
    ridges = [value / bandwidth for value in peaks.values()]
    intensities = [each.flops / each.bytes for each in products]
    low, high = _decades([*intensities, *ridges, min(ridges) / 10])
    bottom, top = _decades([bandwidth * 10.0**low, *peaks.values()])

    def x(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return 1 - (math.log10(value) - bottom) / (top - bottom)

    shapes = "".join(line(x(10.0**n), 0, x(10.0**n), 1, "grid") for n in range(low, high + 1))
    shapes += "".join(line(0, y(10.0**n), 1, y(10.0**n), "grid") for n in range(bottom, top + 1))
    marks = "".join(mark(f"{10.0**n:g}", x(10.0**n), 1, "below") for n in range(low, high + 1))
    marks += "".join(mark(f"{10.0 ** (n - 12):g}", 0, y(10.0**n), "left") for n in range(bottom, top + 1))
    for dtype, value in peaks.items():
        begin = max(10.0**low, 10.0**bottom / bandwidth)
        places = [(begin, bandwidth * begin), (value / bandwidth, value), (10.0**high, value)]
        shapes += (
            f'<polyline class="roof" points="{" ".join(f"{SIDE * x(a):.1f},{SIDE * y(b):.1f}" for a, b in places)}"/>'
        )
        marks += mark(f"{dtype} {short(value / 1e12)} TFLOP/s", 1, y(value), "over finish high")
    total = sum(taken.values())
    for each in sorted(products, key=lambda each: -taken[each])[:_SHOWN]:
        intensity, roof = each.flops / each.bytes, peaks[each.dtype]
        waits = bandwidth * intensity < roof
        size = 6 + 18 * math.sqrt(taken[each] / total)
        left, above = x(intensity), y(min(roof, bandwidth * intensity))
        marks += (
            f'<span class="dot" style="left:{100 * left:.2f}%;top:{100 * above:.2f}%;'
            f'width:{size:.1f}px;height:{size:.1f}px;background:{ORANGE if waits else BLUE}" '
            f'title="{escape(_told(each, taken[each] / total, waits))}"></span>'
        )
    drawn = plot("roofline: TFLOP/s at best by FLOP for a byte", shapes, marks, "roofline")
    return (
        '<p class="axis">TFLOP/s at best, by FLOP for a byte of traffic; the larger a dot, the more of the time</p>'
        + drawn
        + key([("bound by arithmetic", BLUE), ("bound by traffic", ORANGE)])
    )


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.2))
    return low, max(high, low + 1)


def _told(work: Work, part: float, waits: bool) -> str:
    return (
        f"{work.count} of {work.dtype}: {short(work.flops / 1e9)} GFLOP and {short(work.bytes / 1e6)} MB each, "
        f"{short(work.flops / work.bytes)} FLOP for a byte; {part:.0%} of the time of products, bound by "
        f"{'traffic' if waits else 'arithmetic'}"
    )
