"""Memory of a device over a step, stacked by kind, from what stays to what comes and goes."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.planner.figures import KINDS
from lockstep.planner.pictures.chart import KIND_COLOURS, SIDE, gib, key, line, mark, plot, short, ticks
from lockstep.planner.plan import GIB, Plan

_HOVERED = 80  # places of the picture that say their figures
_NAMED_FROM = 0.02  # of the width: shorter phases have no room for a name


def picture(plan: Plan) -> str:
    """Nothing, where it is not known how memory went over the step."""
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
    marks += mark(f"peak {gib(plan.step.peak)}", peak, 1 - plan.step.peak / top, _side(peak))
    if near:
        at = 1 - plan.capacity / top
        shapes += line(0, at, 1, at, "end")
        marks += mark(f"a device has {gib(plan.capacity)}", 1, at, "over finish alarm")
    phases = _phases(plan)
    shapes += "".join(line(begin, 0, begin, 1, "phase") for _, begin, _ in phases if begin > 0)
    shapes += "".join(_hovered(plan, phases))
    strip = "".join(
        f'<span class="{name}" style="left:{100 * begin:.2f}%;width:{100 * (end - begin):.2f}%" title="{name}">'
        f"{name if end - begin > _NAMED_FROM else ''}</span>"
        for name, begin, end in phases
    )
    drawn = plot(f"memory over a step, peak {gib(plan.step.peak)}", shapes, marks, "memory")
    shown = [kind for kind in KINDS if any(point.get(kind, 0) > 0 for point in points)]
    return f'{drawn}<div class="phases">{strip}</div>' + key([(kind, KIND_COLOURS[kind]) for kind in shown])


def _side(at: float) -> str:
    return "over" if 0.15 < at < 0.85 else "over start" if at <= 0.15 else "over finish"


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
    """Each with where it begins and ends, from 0 to 1; what follows the last backward pass is not forward."""
    found, events = plan.step.phases, plan.step.events
    if not found or not events:
        return []
    last = max((n for n, (name, _) in enumerate(found) if name == "backward"), default=-1)
    names = [name for name, _ in found]
    if last >= 0:
        names[last:] = ["gradients" if name == "forward" else name for name in names[last:]]
    if names[-2:] == ["optimizer", "gradients"]:
        names[-1] = "end"
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
        kinds = "".join(f"\n{kind} {gib(highest[kind])}" for kind in KINDS if highest.get(kind, 0) > 0)
        told = f"{phase}: {gib(sum(highest.values()))}{kinds}"
        yield (
            f'<rect x="{SIDE * number / count:.1f}" y="0" width="{SIDE / count:.1f}" height="{SIDE}" class="hover">'
            f"<title>{told}</title></rect>"
        )
