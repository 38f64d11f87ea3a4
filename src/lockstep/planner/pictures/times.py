"""The time of a step, and of what is exchanged along each axis, as bars."""

from __future__ import annotations

from html import escape

from lockstep.planner.figures import Collective
from lockstep.planner.pictures.chart import BLUE, GREEN, ORANGE, RED, Bar, bars, gigabytes, milliseconds
from lockstep.planner.plan import Plan
from lockstep.planner.roofline import seconds


def step(plan: Plan) -> str:
    guess = plan.estimate
    parts = [
        ("products", guess.products, BLUE),
        ("other traffic", guess.traffic, ORANGE),
        ("exchanged beside it", guess.beside, GREEN),
        ("waited for", guess.between, RED),
    ]
    return bars("time of a step", [Bar(name, value, milliseconds(value), colour) for name, value, colour in parts])


def exchange(plan: Plan) -> str:
    """Axis by axis, the one that takes the longest first; all bars have one scale."""
    axes: dict[str, list[Collective]] = {}
    for each in plan.step.collectives:
        axes.setdefault(each.axis, []).append(each)
    taken = {axis: sum(seconds(one, plan.target) for one in ones) for axis, ones in axes.items()}
    rows = []
    for axis in sorted(axes, key=lambda each: -taken[each]):
        size = sum(one.bytes for one in axes[axis])
        rows.append(Bar(f"over {axis}", taken[axis], f"{milliseconds(taken[axis])}, {gigabytes(size)}", GREEN))
        rows += [
            Bar(f"· {one.name}, {one.count} of them", seconds(one, plan.target),
                f"{milliseconds(seconds(one, plan.target))}, {gigabytes(one.bytes)}", BLUE)
            for one in axes[axis]
        ]  # fmt: skip
    ranks = ", ".join(f"{escape(axis)} has {max(one.ranks for one in ones)} ranks" for axis, ones in axes.items())
    return bars("exchanged along each axis", rows) + f'<p class="axis">Of a line: {ranks}.</p>'
