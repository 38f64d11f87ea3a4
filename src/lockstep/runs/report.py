"""The page of runs, one file that needs no network, and the lines that a run ends with.

Every rank imports this module, so what draws the page is imported when there is one to draw.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.record.run_folder import read_summary, write_text

if TYPE_CHECKING:
    from lockstep.runs.reader import Run

REPORT_FILE = "report.html"


def write_report(runs: Sequence[Path], file: Path, over: bool = False) -> None:
    """Writes one page of all of these runs. Raises ConfigError if one is no run, or the file cannot be written."""
    from lockstep.runs.reader import read_run

    write_text(file, report_page([read_run(folder, over=over) for folder in runs]))


def leave_report(folder: Path, say: Callable[[str], object]) -> None:
    """Writes report.html at the end of a run; an error is only reported."""
    try:
        write_report([folder], folder / REPORT_FILE, over=True)
    except Exception as error:
        say(f"no {REPORT_FILE}: {error if isinstance(error, ConfigError) else f'{type(error).__name__}: {error}'}")


def closing_lines(folder: Path, where: Any, further: str, here: bool = True) -> list[str]:
    """Returns what to print at the end of a run. `where` is its folder or URL, `further` the command to train on.

    Without `here`, the folder is not one that the reader can look into.
    """
    lines = [_outcome(read_summary(folder)), f"run folder: {where}"]
    if here and str(where) != str(folder):
        lines.append(f"its copy here:  {folder}")
    lines.append(f"train further:  {further}")
    if not here:
        return lines
    if (folder / REPORT_FILE).is_file():
        lines.append(f"look at it:     {folder / REPORT_FILE}")
    if (folder / "tensorboard").is_dir():
        lines.append(f"or in:          tensorboard --logdir {folder}")
    if (folder / "profile").is_dir():
        lines.append(f"its profile:    {folder / 'profile'}")
    return lines


def _outcome(summary: Mapping[str, Any]) -> str:
    parts = [f"epoch {summary.get('epoch', '?')}, step {summary.get('step', '?')}"]
    if isinstance(seconds := summary.get("seconds"), (int, float)):
        parts[0] += f" in {seconds:.1f} s"
    metrics = summary.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, (int, float)):
            parts.append(f"{name} {value:.4g}")
    return f"{summary.get('status', 'ended')}: {'  '.join(parts)}"


# Nothing is fetched from anywhere, whatever a run's names and messages say.
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src {}"


def report_page(runs: Sequence[Run]) -> str:
    from lockstep.runs.data import page_data

    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    return _page(title, page_data(runs), "'none'")


def served_page(title: str, source: str) -> str:
    """Returns the page for a server: it polls `source` for what it shows."""
    return _page(title, {"source": source}, "'self'")


def policy(connect: str) -> str:
    return _ALLOWED.format(connect)


def _page(title: str, data: Any, connect: str) -> str:
    # No text inside may end the script element.
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
