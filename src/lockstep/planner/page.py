"""A plan as a page: one file with everything in it, that opens from a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from lockstep.planner.figures import KINDS
from lockstep.planner.plan import GIB, Plan

_WIDTH, _HEIGHT, _LEFT = 900, 260, 60
# A colour for every kind, told apart by those who see no red or green as well (Okabe and Ito's).
_COLOURS = dict(
    zip(KINDS, ("#0072b2", "#e69f00", "#009e73", "#999999", "#56b4e9", "#d55e00", "#cc79a7", "#f0e442"), strict=True)
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #8886; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --page: #161616; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
.fits { color: #009e73; } .not { color: #d55e00; } code { font-size: .9em; }
"""


def page(title: str, plans: Sequence[Plan]) -> str:
    body = "".join(part for plan in plans for part in _sections(plan))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def _sections(plan: Plan) -> Iterator[str]:
    verdict = f"{plan.margin / GIB:.1f} GiB left" if plan.fits else f"{-plan.margin / GIB:.1f} GiB too much"
    kind, word = ("fits", "fits") if plan.fits else ("not", "does not fit")
    yield f'<h2>{escape(plan.target.title)}: <span class="{kind}">{word}</span>, {verdict}</h2>'
    yield "<h3>Memory of a device over a step</h3>" + _timeline(plan) + _kinds(plan)
    yield "<h3>The largest tensors at the peak</h3>" + _largest(plan)
    yield "<h3>Devices and axes</h3>" + _mesh(plan)
    yield "<h3>Time of a step at least, by the datasheet (an estimate)</h3>" + _time(plan)
    if plan.step.collectives:
        yield "<h3>What a device exchanges</h3>" + _exchange(plan)


def _timeline(plan: Plan) -> str:
    """Stacked by kind, from what stays to what comes and goes; the line is the device's end."""
    points = plan.step.timeline
    top = max([plan.step.peak, min(plan.capacity, 1.5 * plan.step.peak)]) * 1.05 or 1.0
    across = (_WIDTH - _LEFT) / max(len(points) - 1, 1)
    below = [0] * len(points)
    shapes = []
    for kind in KINDS:
        above = [base + max(point.get(kind, 0), 0) for base, point in zip(below, points, strict=True)]
        if above == below:
            continue
        outline = [(n, value) for n, value in enumerate(above)] + [(n, below[n]) for n in reversed(range(len(below)))]
        places = " ".join(f"{_LEFT + n * across:.1f},{_y(value, top):.1f}" for n, value in outline)
        shapes.append(f'<polygon points="{places}" fill="{_COLOURS[kind]}"><title>{kind}</title></polygon>')
        below = above
    marks = "".join(
        f'<text x="0" y="{_y(top * part / 4, top) + 4:.1f}">{top * part / 4 / GIB:.1f}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(top * part / 4, top):.1f}" y2="{_y(top * part / 4, top):.1f}" '
        'stroke="var(--faint)"/>'
        for part in range(5)
    )
    end = ""
    if plan.capacity <= top:
        at = f"{_y(plan.capacity, top):.1f}"
        end = f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{at}" y2="{at}" stroke="#d55e00" stroke-width="2"/>'
    label = f"memory over a step in GiB, peak {plan.step.peak / GIB:.2f}"
    drawn = f"{marks}{''.join(shapes)}{end}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 20}" role="img" aria-label="{label}">{drawn}</svg>'


def _y(value: float, top: float) -> float:
    return 10 + _HEIGHT * (1 - value / top)


def _kinds(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td><svg viewBox="0 0 10 10" style="width:.8em"><rect width="10" height="10" fill="{_COLOURS[kind]}"/>'
        f'</svg> {kind}</td><td class="n">{plan.step.by_kind[kind] / GIB:.3f} GiB</td></tr>'
        for kind in KINDS
        if plan.step.by_kind.get(kind)
    )
    return f"<table>{rows}</table>"


def _largest(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td class="n">{each.bytes / GIB:.3f} GiB</td><td>{each.kind}</td><td>{" × ".join(map(str, each.shape))} '
        f"{escape(each.dtype)}</td><td><code>{escape(each.line)}</code></td></tr>"
        for each in plan.step.largest
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _mesh(plan: Plan) -> str:
    """Hosts as boxes with their devices, in rank order; of many hosts the first few."""
    shown, per_host = min(plan.target.hosts, 8), plan.target.device.per_host
    size, gap = 22, 6
    parts = []
    for host in range(shown):
        count = min(per_host, plan.target.count - host * per_host)
        x = host * (4 * (size + gap) + 3 * gap)
        rows = -(-count // 4)
        parts.append(
            f'<rect x="{x}" y="0" width="{4 * (size + gap) + gap}" height="{rows * (size + gap) + gap}" fill="none" '
            f'stroke="var(--faint)"/><text x="{x}" y="{rows * (size + gap) + gap + 16}">host {host}</text>'
        )
        for place in range(count):
            at = (x + gap + place % 4 * (size + gap), gap + place // 4 * (size + gap))
            parts.append(f'<rect x="{at[0]}" y="{at[1]}" width="{size}" height="{size}" fill="#0072b2"><title>rank '
                         f'{host * per_host + place}</title></rect>')  # fmt: skip
    axes = sorted({(each.axis, each.ranks) for each in plan.step.collectives if each.ranks > 1})
    told = ", ".join(f"{axis} {ranks}" for axis, ranks in axes) or "one device"
    more = f"; {plan.target.hosts - shown} more hosts" if plan.target.hosts > shown else ""
    drawn = f'<svg viewBox="0 0 {_WIDTH} 90" role="img" aria-label="devices">{"".join(parts)}</svg>'
    return f"{drawn}<p>Axes: {escape(told)}{more}.</p>"


def _time(plan: Plan) -> str:
    guess = plan.estimate
    bars = {"products": guess.products, "other traffic": guess.traffic, "exchanged beside it": guess.beside,
            "waited for": guess.between}  # fmt: skip
    return _bars({name: (value, f"{value * 1e3:.1f} ms") for name, value in bars.items()})


def _exchange(plan: Plan) -> str:
    found = {
        f"{each.name} over {each.axis}": (float(each.bytes), f"{each.count} of {each.bytes / 1e9:.3f} GB")
        for each in plan.step.collectives
    }
    return _bars(found)


def _bars(values: dict[str, tuple[float, str]]) -> str:
    most = max((value for value, _ in values.values()), default=0.0) or 1.0
    rows = [
        f'<text x="0" y="{n * 24 + 16}">{escape(name)}</text>'
        f'<rect x="280" y="{n * 24 + 4}" width="{max(value / most * 420, 1):.1f}" height="16" fill="#0072b2"/>'
        f'<text x="{290 + max(value / most * 420, 1):.1f}" y="{n * 24 + 16}">{escape(said)}</text>'
        for n, (name, (value, said)) in enumerate(values.items())
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {24 * len(rows) + 8}" role="img">{"".join(rows)}</svg>'
