"""The page of a plan or a search: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.planner.charts import exchange, memory, mesh, milliseconds, roofline, step_time, ways
from lockstep.planner.devices import Target
from lockstep.planner.plan import KINDS, Plan
from lockstep.planner.search import Way
from lockstep.shown import binary_size


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
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def _sections(plan: Plan, precision: str) -> Iterator[str]:
    step = plan.step
    verdict = f"{binary_size(plan.margin)} left" if plan.fits else f"{binary_size(-plan.margin)} too much"
    kind, word = ("fits", "fits") if plan.fits else ("not", "does not fit")
    yield f'<h2>{escape(plan.target.title)}: <span class="{kind}">{word}</span>, {verdict}</h2>'
    yield f"<p>{escape(_summary(plan))}</p>"
    drawn = memory(plan)
    yield f"<h3>Memory of a device {'over a step, in GiB' if drawn else 'at its peak'}</h3>{drawn}" + _kinds(plan)
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
        text.append(f"{binary_size(step.host_bytes)} for each device are in the memory of its host")
    return ". ".join(["; ".join(text), *step.notes]) + "."


def _kinds(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td>{kind}</td><td class="n">{binary_size(plan.step.by_kind[kind])}</td></tr>'
        for kind in KINDS
        if plan.step.by_kind.get(kind)
    )
    return f'<p class="axis">At the peak</p><table>{rows}</table>' if rows else ""


def _largest(plan: Plan) -> str:
    rows = "".join(
        f'<tr><td class="n">{binary_size(each.bytes)}</td><td>{escape(each.kind)}</td>'
        f"<td>{' × '.join(map(str, each.shape))} {escape(each.dtype)}</td>"
        f"<td><code>{escape(each.line or each.operation)}</code></td></tr>"
        for each in plan.step.largest
    )
    return f'<div class="scroll"><table>{rows}</table></div>'
