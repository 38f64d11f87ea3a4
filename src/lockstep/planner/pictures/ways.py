"""A search: every way as a bar of its time, the fastest that fits first, and of the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lockstep.planner.pictures.chart import BLUE, GREEN, GREY, RED, gib, key, milliseconds, short
from lockstep.planner.plan import GIB, Plan
from lockstep.planner.search import Tried


def picture(found: Sequence[Tried], price: float | None) -> str:
    traced = [(each, each.plan) for each in found if each.plan is not None]
    most = max((plan.estimate.step for _, plan in traced), default=0.0) or 1.0
    rows = "".join(_row(each, plan, most, n == 0 and plan.fits, price) for n, (each, plan) in enumerate(traced))
    others = "".join(
        f"<li><b>{escape(each.way.title)}</b>: {escape(each.why_not.splitlines()[0])}</li>"
        for each in found
        if each.plan is None
    )
    colours = [("time of a step at least", BLUE), ("memory, of what a device has", GREEN), ("does not fit", RED)]
    left = f'<p class="axis">Without a plan</p><ul>{others}</ul>' if others else ""
    return f'<div class="bars ways" role="img" aria-label="ways by their time">{rows}</div>{key(colours)}{left}'


def _row(each: Tried, plan: Plan, most: float, best: bool, price: float | None) -> str:
    held = plan.step.peak / plan.capacity
    told = [milliseconds(plan.estimate.step), f"{short(plan.step.peak / GIB)} of {gib(plan.capacity)}"]
    if price is not None and (cost := plan.price_per_epoch(price)) is not None:
        told.append(f"{cost:,.2f} an epoch")
    verdict = ' <b class="fits">the best</b>' if best else "" if plan.fits else ' <b class="not">does not fit</b>'
    return (
        f'<div class="row"><span class="of">{escape(each.way.title)}{verdict}</span><span class="track">'
        f'<span style="width:{100 * plan.estimate.step / most:.2f}%;background:{BLUE if plan.fits else GREY}"></span>'
        f'<span style="width:{100 * min(held, 1):.2f}%;background:{GREEN if plan.fits else RED}"></span></span>'
        f'<span class="told">{escape(" · ".join(told))}</span></div>'
    )
