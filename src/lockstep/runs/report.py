"""Writes the page of a run: where the user asks for it, and as report.html at the end of every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.record.run_folder import write_text

REPORT_FILE = "report.html"


def write_report(runs: Sequence[Path], file: Path, over: bool = False) -> None:
    """One page of all of these runs; ConfigError where one is none, or the file cannot be written."""
    from lockstep.runs.page import report_page
    from lockstep.runs.reader import read_run

    write_text(file, report_page([read_run(folder, over=over) for folder in runs]))


def leave_report(folder: Path, tell: Callable[[str], object]) -> Path | None:
    """At the end of a run, by whoever started it. What goes wrong costs a line, and nothing else."""
    try:
        write_report([folder], folder / REPORT_FILE, over=True)
    except Exception as error:
        tell(f"no {REPORT_FILE}: {error if isinstance(error, ConfigError) else f'{type(error).__name__}: {error}'}")
        return None
    return folder / REPORT_FILE
