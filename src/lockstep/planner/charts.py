"""The charts of a plan's page as HTML and SVG text, without scripts or external files.

Shapes stretch to the width of the page; text is placed over them in percent, so it has the same size on a phone.
Hovering shows the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from lockstep.planner.plan import GIB, KINDS, Collective, Plan, Work, seconds
from lockstep.planner.plan import peak as peak_of
from lockstep.planner.search import Way
from lockstep.shown import binary_size

SIDE = 1000  # of a plot, in the units of its shapes
# Told apart by those who see no red or green as well (Okabe and Ito's).
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#999999"
SKY, RED, PINK, YELLOW = "#56b4e9", "#d55e00", "#cc79a7", "#f0e442"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
KIND_COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, GREY, SKY, RED, PINK, YELLOW), strict=True))
_HOVERED = 80  # places of the picture that say their figures
_NAMED_FROM = 0.02  # of the width: shorter phases have no room for a name
_HOSTS_DRAWN = 8  # that are drawn, of more
_RANKS_NAMED = 8  # that are named, of a longer line
_DOTS = 60  # dots: those that take the most time


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    text: str
    colour: str = BLUE


def plot(label: str, shapes: str, marks: str, kind: str = "") -> str:
    """`shapes` use coordinates from 0 to SIDE, `marks` are HTML in percent."""
    return (
        f'<div class="plot {kind}" role="img" aria-label="{escape(label)}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">{shapes}</svg>{marks}</div>'
    )


def mark(text: str, left: float, top: float, kind: str) -> str:
    return f'<span class="mark {kind}" style="left:{100 * left:.2f}%;top:{100 * top:.2f}%">{escape(text)}</span>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    text = f"<title>{escape(title)}</title>" if title else ""
    places = " ".join(
        f'{name}="{SIDE * at:.1f}"' for name, at in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2))
    )  # fmt: skip
    return f'<line {places} class="{kind}">{text}</line>'


def bars(label: str, values: Sequence[Bar]) -> str:
    most = max((each.value for each in values), default=0.0) or 1.0
    rows = "".join(
        f'<div class="row"><span class="of">{escape(each.label)}</span><span class="track">'
        f'<span style="width:{100 * each.value / most:.2f}%;background:{each.colour}"></span></span>'
        f'<span class="text">{escape(each.text)}</span></div>'
        for each in values
    )
    return f'<div class="bars" role="img" aria-label="{escape(label)}">{rows}</div>'


def key(colours: Sequence[tuple[str, str]]) -> str:
    return (
        '<p class="key">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for text, colour in colours)
        + "</p>"
    )


def ticks(top: float, about: int = 4) -> list[float]:
    if top <= 0:
        return [0.0]
    size = 10 ** math.floor(math.log10(top / about))
    step = next(size * each for each in (1, 2, 5, 10) if size * each * about >= top * 0.8)
    return [step * number for number in range(int(top / step) + 1)]


def short(value: float) -> str:
    """Formats three significant digits without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def milliseconds(seconds: float) -> str:
    return f"{short(seconds * 1e3)} ms" if seconds >= 1e-6 or not seconds else "below 0.001 ms"


def gigabytes(size: float) -> str:
    unit, text = next(((10**n, text) for n, text in ((9, "GB"), (6, "MB")) if size >= 10**n / 100), (10**3, "kB"))
    return f"{short(size / unit)} {text}"


# Memory of a device over a step, stacked by kind, from what stays to what comes and goes.


def memory(plan: Plan) -> str:
    """Returns nothing if the timeline is unknown."""
    points = plan.step.timeline
    if len(points) < 2:
        return ""
    near = plan.capacity < 1.5 * plan.step.peak
    top = max(plan.step.peak, plan.capacity if near else 0) * 1.12
    levels = ticks(top / GIB)
    shapes = "".join(line(0, 1 - each * GIB / top, 1, 1 - each * GIB / top, "grid") for each in levels)
    shapes += "".join(_stacked(points, top))
    marks = "".join(mark(short(each), 0, 1 - each * GIB / top, "left") for each in levels)
    totals = [sum(each.values()) for each in points]
    peak = totals.index(max(totals)) / (len(points) - 1)
    shapes += line(peak, 1 - plan.step.peak / top, peak, 1, "peak")
    side = "over" if 0.15 < peak < 0.85 else "over start" if peak <= 0.15 else "over finish"
    marks += mark(f"peak {binary_size(plan.step.peak)}", peak, 1 - plan.step.peak / top, side)
    if near:
        at = 1 - plan.capacity / top
        shapes += line(0, at, 1, at, "end")
        marks += mark(f"a device has {binary_size(plan.capacity)}", 1, at, "over finish alarm")
    phases = _phases(plan)
    shapes += "".join(line(begin, 0, begin, 1, "phase") for _, begin, _ in phases if begin > 0)
    shapes += "".join(_hovered(plan, phases))
    strip = "".join(
        f'<span class="{name}" style="left:{100 * begin:.2f}%;width:{100 * (end - begin):.2f}%" title="{name}">'
        f"{name if end - begin > _NAMED_FROM else ''}</span>"
        for name, begin, end in phases
    )
    drawn = plot(f"memory over a step, peak {binary_size(plan.step.peak)}", shapes, marks, "memory")
    shown = [kind for kind in KINDS if any(point.get(kind, 0) > 0 for point in points)]
    return f'{drawn}<div class="phases">{strip}</div>' + key([(kind, KIND_COLOURS[kind]) for kind in shown])


def _stacked(points: list[dict[str, int]], top: float) -> Iterator[str]:
    across = SIDE / (len(points) - 1)
    below = [0] * len(points)
    for kind in KINDS:
        above = [base + max(point.get(kind, 0), 0) for base, point in zip(below, points, strict=True)]
        if above != below:
            outline = [*enumerate(above), *reversed([*enumerate(below)])]
            places = " ".join(f"{n * across:.1f},{SIDE * (1 - value / top):.1f}" for n, value in outline)
            yield f'<polygon points="{places}" fill="{KIND_COLOURS[kind]}"/>'
        below = above


def _phases(plan: Plan) -> list[tuple[str, float, float]]:
    """Returns each phase with its begin and end from 0 to 1."""
    found, events = plan.step.phases, plan.step.events
    if not found or not events:
        return []
    last = max((n for n, (name, _) in enumerate(found) if name == "backward"), default=-1)
    names = [name for name, _ in found]
    if last >= 0:
        names[last:] = ["gradients" if name == "forward" else name for name in names[last:]]
    end = len(names) - ("validation" in names)
    if names[end - 2 : end] == ["optimizer", "gradients"]:
        names[end - 1] = "end"
    begins = [min(at / events, 1.0) for _, at in found]
    return [each for each in zip(names, begins, [*begins[1:], 1.0], strict=True) if each[2] > each[1]]


def _hovered(plan: Plan, phases: list[tuple[str, float, float]]) -> Iterator[str]:
    points = plan.step.timeline
    count = min(_HOVERED, len(points))
    for number in range(count):
        part = points[number * len(points) // count : (number + 1) * len(points) // count]
        highest = max(part, key=lambda each: sum(each.values()))
        at = (number + 0.5) / count
        phase = next((name for name, begin, end in phases if begin <= at < end), "")
        kinds = "".join(f"\n{kind} {binary_size(highest[kind])}" for kind in KINDS if highest.get(kind, 0) > 0)
        text = f"{phase}: {binary_size(sum(highest.values()))}{kinds}"
        yield (
            f'<rect x="{SIDE * number / count:.1f}" y="0" width="{SIDE / count:.1f}" height="{SIDE}" class="hover">'
            f"<title>{text}</title></rect>"
        )


# The mesh: hosts as boxes with their devices, once for each axis. Devices of one colour are a line along it.


def mesh(plan: Plan) -> str:
    axes = {axis: size for axis, size in plan.step.mesh.items() if size > 1}
    if not axes or math.prod(axes.values()) != plan.target.count:
        return _hosts(plan, {}, None)
    return "".join(_along(plan, axes, axis) for axis in axes)


def _along(plan: Plan, axes: Mapping[str, int], axis: str) -> str:
    lines, size = plan.target.count // axes[axis], axes[axis]
    ranks = _line(axes, axis, 0)
    inside = max(ranks) < plan.target.device.per_host or plan.target.hosts == 1
    where = "" if plan.target.hosts == 1 else ", within a host" if inside else ", over hosts"
    count = "one line" if lines == 1 else f"{lines} lines"
    return f'<p class="axis"><b>{escape(axis)}</b>: {count} of {size}{where}</p>{_hosts(plan, axes, axis)}'


def _hosts(plan: Plan, axes: Mapping[str, int], axis: str | None) -> str:
    per_host, hosts = plan.target.device.per_host, plan.target.hosts
    shown = min(hosts, _HOSTS_DRAWN)
    boxes = []
    for host in range(shown):
        first = host * per_host
        count = min(per_host, plan.target.count - first)
        devices = "".join(_device(rank, axes, axis) for rank in range(first, first + count))
        boxes.append(f'<div class="host"><div class="devices">{devices}</div><small>host {host}</small></div>')
    more = f'<div class="more">and {hosts - shown} more hosts</div>' if hosts > shown else ""
    return f'<div class="hosts" role="img" aria-label="hosts and devices">{"".join(boxes)}{more}</div>'


def _device(rank: int, axes: Mapping[str, int], axis: str | None) -> str:
    if axis is None:
        return f'<span title="rank {rank}">{rank}</span>'
    line = _line(axes, axis, rank)
    place = ", ".join(f"{name} {at}" for name, at in _place(axes, rank).items())
    others = ", ".join(map(str, line[:_RANKS_NAMED])) + (f", ... {line[-1]}" if len(line) > _RANKS_NAMED else "")
    colour = COLOURS[_number(axes, axis, rank) % len(COLOURS)]
    text = escape(f"rank {rank}: {place}; along {axis} with {others}")
    return f'<span style="border-color:{colour};background:{colour}44" title="{text}">{rank}</span>'


def _place(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns the coordinates of a rank; the last axis runs fastest."""
    return dict(zip(axes, map(int, np.unravel_index(rank, list(axes.values()))), strict=True))


def _line(axes: Mapping[str, int], axis: str, rank: int) -> list[int]:
    """Returns the ranks of the line along an axis that contains a rank."""
    ranks = np.arange(math.prod(axes.values())).reshape(list(axes.values()))
    found: list[int] = ranks[
        tuple(slice(None) if name == axis else at for name, at in _place(axes, rank).items())
    ].tolist()
    return found


def _number(axes: Mapping[str, int], axis: str, rank: int) -> int:
    """Returns the number of that line."""
    number = 0
    for name, at in _place(axes, rank).items():
        number = number if name == axis else number * axes[name] + at
    return number


# The roofline: what a device can do at best, by how much is computed for a byte; every kind of product is a dot.


def roofline(plan: Plan, precision: str) -> str:
    """Returns nothing if the matrix products are unknown."""
    products = [each for each in plan.step.work if each.flops and each.bytes]
    if not products:
        return ""
    bandwidth = plan.target.device.bandwidth * 1e9
    peaks = {each.dtype: peak_of(plan.target, each.dtype, precision) for each in products}
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
    for each in sorted(products, key=lambda each: -taken[each])[:_DOTS]:
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


# The time of a step, and of what is exchanged along each axis, as bars.


def step_time(plan: Plan) -> str:
    guess = plan.estimate
    parts = [
        ("products", guess.products, BLUE),
        ("other traffic", guess.traffic, ORANGE),
        ("exchanged beside it", guess.beside, GREEN),
        ("waited for", guess.between, RED),
    ]
    return bars("time of a step", [Bar(name, value, milliseconds(value), colour) for name, value, colour in parts])


def exchange(plan: Plan) -> str:
    """Lists the axes, the slowest first, with one scale for all bars."""
    axes: dict[str, list[Collective]] = {}
    for each in plan.step.collectives:
        axes.setdefault(each.axis, []).append(each)
    taken = {axis: sum(seconds(one, plan.target) for one in ones) for axis, ones in axes.items()}
    rows = []
    for axis in sorted(axes, key=lambda each: -taken[each]):
        size = sum(one.bytes for one in axes[axis])
        rows.append(Bar(f"over {axis}", taken[axis], f"{milliseconds(taken[axis])}, {gigabytes(size)}", GREEN))
        rows += [
            Bar(f"· {one.title}, {one.count} of them", seconds(one, plan.target),
                f"{milliseconds(seconds(one, plan.target))}, {gigabytes(one.bytes)}", BLUE)
            for one in axes[axis]
        ]  # fmt: skip
    ranks = ", ".join(f"{escape(axis)} has {max(one.ranks for one in ones)} ranks" for axis, ones in axes.items())
    return bars("exchanged along each axis", rows) + f'<p class="axis">Of a line: {ranks}.</p>'


# A search: every way as a bar of its time, the fastest that fits first, and of the memory that it takes.


def ways(found: Sequence[Way]) -> str:
    traced = [(each, each.plan) for each in found if each.plan is not None]
    most = max((plan.estimate.step for _, plan in traced), default=0.0) or 1.0
    rows = "".join(_way(each, plan, most, n == 0 and plan.fits) for n, (each, plan) in enumerate(traced))
    others = "".join(
        f"<li><b>{escape(each.title)}</b>: {escape(each.why_not.splitlines()[0])}</li>"
        for each in found
        if each.plan is None
    )
    colours = [("time of a step at least", BLUE), ("memory, of what a device has", GREEN), ("does not fit", RED)]
    left = f'<p class="axis">Without a plan</p><ul>{others}</ul>' if others else ""
    return f'<div class="bars ways" role="img" aria-label="ways by their time">{rows}</div>{key(colours)}{left}'


def _way(each: Way, plan: Plan, most: float, best: bool) -> str:
    held = plan.step.peak / plan.capacity
    text = [milliseconds(plan.estimate.step), f"{binary_size(plan.step.peak)} of {binary_size(plan.capacity)}"]
    verdict = ' <b class="fits">the best</b>' if best else "" if plan.fits else ' <b class="not">does not fit</b>'
    return (
        f'<div class="row"><span class="of">{escape(each.title)}{verdict}</span><span class="track">'
        f'<span style="width:{100 * plan.estimate.step / most:.2f}%;background:{BLUE if plan.fits else GREY}"></span>'
        f'<span style="width:{100 * min(held, 1):.2f}%;background:{GREEN if plan.fits else RED}"></span></span>'
        f'<span class="text">{escape(" · ".join(text))}</span></div>'
    )
