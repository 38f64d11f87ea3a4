"""The page of runs: one file with everything in it, that opens from a disk; or the same, served, following its runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from lockstep.runs.data import page_data
from lockstep.runs.reader import Run

# Nothing is fetched from anywhere, whatever a run's names and messages say.
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src {}"


def report_page(runs: Sequence[Run]) -> str:
    """A page that needs nothing but itself."""
    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    return _page(title, page_data(runs), "'none'")


def served_page(title: str, source: str) -> str:
    """The same for a server: the page asks `source`, again and again, for what it shows."""
    return _page(title, {"source": source}, "'self'")


def policy(connect: str) -> str:
    return _ALLOWED.format(connect)


def _page(title: str, data: Any, connect: str) -> str:
    # Whatever is in there, it does not end the element that it is in.
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    style = f"{_static('uPlot.min.css')}\n{_static('report.css')}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(connect))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        '<body><main id="page"><noscript>This page draws its charts with JavaScript.</noscript></main>'
        f'<script type="application/json" id="data">{plain}</script>'
        f"<script>{_static('uPlot.iife.min.js')}</script><script>{_static('report.js')}</script></body></html>\n"
    )


@functools.cache
def _static(name: str) -> str:
    return resources.files("lockstep.runs").joinpath("static", name).read_text(encoding="utf-8")
