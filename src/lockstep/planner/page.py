"""The page of a plan or a search: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.planner.charts import exchange, gib, memory, mesh, milliseconds, roofline, step_time, ways
from lockstep.planner.devices import Target
from lockstep.planner.figures import KINDS
from lockstep.planner.plan import Plan
from lockstep.planner.search import Way


def plans_page(name: str, plans: Sequence[Plan], precision: str) -> str:
    return _page(f"{name}: a plan", "".join(part for plan in plans for part in _sections(plan, precision)))


def search_page(name: str, found: Sequence[tuple[Target, Sequence[Way]]], precision: str) -> str:
    parts = []
    for target, tried in found:
        parts.append(f"<h2>Ways to spread it over {escape(target.title)}</h2>{ways(tried)}")
        best = tried[0]
        if best.plan is not None and best.fits:
            parts.append(f"<h2>The best: {escape(best.title)}</h2>")
            parts += _sections(best.plan, precision)
    return _page(f"{name}: a search", "".join(parts))


def write_page(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {file}: {error.strerror}") from None


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def _sections(plan: Plan, precision: str) -> Iterator[str]:
    step = plan.step
    verdict = f"{gib(plan.margin)} left" if plan.fits else f"{gib(-plan.margin)} too much"
    kind, word = ("fits", "fits") if plan.fits else ("not", "does not fit")
    yield f'<h2>{escape(plan.target.title)}: <span class="{kind}">{word}</span>, {verdict}</h2>'
    yield f"<p>{escape(_summary(plan))}</p>"
    yield "<h3>Memory of a device over a step, in GiB</h3>" + memory(plan) + _kinds(plan)
    if step.largest:
        yield "<h3>The largest tensors at the peak</h3>" + _largest(plan)
    yield "<h3>Hosts, devices and axes</h3>" + mesh(plan)
    yield "<h3>Time of a step at least, by the datasheet (an estimate)</h3>" + step_time(plan)
    if drawn := roofline(plan, precision):
        yield "<h3>Products of matrices on the roofline</h3>" + drawn
    if step.collectives:
        yield "<h3>What a device exchanges, by axis</h3>" + exchange(plan)


def _summary(plan: Plan) -> str:
    step = plan.step
    at_least = milliseconds(plan.estimate.step)
    text = [f"{step.parameters:,} parameters, {step.batch} examples in a step of at least {at_least}"]
    if plan.largest_batch:
        text.append(f"the largest batch that fits is {plan.largest_batch}")
    if step.host_bytes:
        text.append(f"{gib(step.host_bytes)} for each device are in the memory of its host")
    return "; ".join(text) + "."


def _kinds(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td>{kind}</td><td class="n">{gib(plan.step.by_kind[kind])}</td></tr>'
        for kind in KINDS
        if plan.step.by_kind.get(kind)
    )
    return f'<p class="axis">At the peak</p><table>{rows}</table>' if rows else ""


def _largest(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td class="n">{gib(each.bytes)}</td><td>{escape(each.kind)}</td>'
        f"<td>{' × '.join(map(str, each.shape))} {escape(each.dtype)}</td>"
        f"<td><code>{escape(each.line or each.operation)}</code></td></tr>"
        for each in plan.step.largest
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --line: #8885; --page: #fff; --panel: #8881; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #aaa; --line: #8887; --page: #161616; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
       margin: 1.5rem auto 4rem; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-size: .9em; }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } .scroll td { white-space: nowrap; }
.fits { color: #00805d; } .not { color: #c04a00; } code { font-size: .9em; }
.axis { margin: .6rem 0 .3rem; color: var(--soft); }
@media (prefers-color-scheme: dark) { .fits { color: #2fc99b; } .not { color: #ff8a4a; } }
.plot { position: relative; height: 17rem; margin: 1.6rem 0 0 3rem; } .plot.roofline { margin-bottom: 2rem; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.plot line, .plot polyline { vector-effect: non-scaling-stroke; fill: none; }
.grid { stroke: var(--line); } .end { stroke: #d55e00; stroke-width: 2; }
.roof { stroke: var(--ink); stroke-width: 1.5; }
.peak, .phase { stroke: var(--ink); stroke-dasharray: 3 3; } .phase { stroke-opacity: .6; }
.hover { fill: transparent; } .hover:hover { fill: #8884; }
.mark { position: absolute; font-size: 12px; line-height: 1; white-space: nowrap; pointer-events: none; }
.left { transform: translate(calc(-100% - .4rem), -50%); color: var(--soft); }
.below { transform: translate(-50%, .4rem); color: var(--soft); }
.over { transform: translate(-50%, calc(-100% - 4px)); padding: 0 3px; background: var(--page); }
.over.start { transform: translate(0, calc(-100% - 4px)); }
.over.finish { transform: translate(-100%, calc(-100% - 4px)); }
.over.high { transform: translate(-100%, calc(-100% - 14px)); } .alarm { color: #c04a00; font-weight: 600; }
@media (prefers-color-scheme: dark) { .alarm { color: #ff8a4a; } }
.dot { position: absolute; border-radius: 50%; transform: translate(-50%, -50%);
       border: 1px solid var(--page); opacity: .85; }
.phases { position: relative; height: 1.5rem; margin: 2px 0 0 3rem; font-size: 12px; }
.phases span { position: absolute; height: 100%; overflow: hidden; white-space: nowrap; text-overflow: ellipsis;
               text-align: center; line-height: 1.5rem; background: var(--panel); border-right: 1px solid var(--line); }
.phases .backward { background: #8883; } .phases .optimizer { background: #8885; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .85em; margin: .6rem 0; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.bars { font-size: .9em; }
.row { display: grid; grid-template: "of track text" / 15rem 1fr 15rem; gap: 0 .8rem;
       align-items: center; padding: .15rem 0; }
.of { grid-area: of; } .track { grid-area: track; min-width: 0; }
.text { grid-area: text; font-variant-numeric: tabular-nums; }
.track span { display: block; height: .9rem; min-width: 1px; border-radius: 2px; }
.track span + span { height: .35rem; margin-top: 2px; }
.ways .row { grid-template-columns: 17rem 1fr 18rem; border-top: 1px solid var(--line); padding: .35rem 0; }
.hosts { display: flex; flex-wrap: wrap; gap: .6rem; }
.host { border: 1px solid var(--line); border-radius: 6px; padding: .4rem; }
.devices { display: grid; grid-template-columns: repeat(4, 2.2rem); gap: .3rem; }
.host small, .more { color: var(--soft); }
.devices span { border: 2px solid var(--line); border-radius: 4px; text-align: center;
                font-size: 12px; line-height: 1.7rem; }
.more { align-self: center; }
@media (max-width: 44rem) {
  .row { grid-template: "of text" "track track" / 1fr auto; } .text { text-align: right; } .of { min-width: 8rem; }
  .ways .row { grid-template: "of" "track" "text" / 1fr; } .ways .text { text-align: left; }
  .plot, .phases { margin-left: 2.4rem; } .plot { height: 14rem; }
}
"""
