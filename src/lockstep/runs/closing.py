"""The lines that a run ends with: how it went, where it is, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.profiler import shares
from lockstep.record.run_folder import read_summary
from lockstep.runs.report import REPORT_FILE


def closing_lines(folder: Path, where: Any, further: str) -> list[str]:
    """`where` names the run, a folder or the URL that it stands for; `further` is the command that trains on."""
    lines = [outcome(read_summary(folder)), f"run folder: {where}"]
    if str(where) != str(folder):
        lines.append(f"its copy here:  {folder}")
    lines.append(f"train further:  {further}")
    if (folder / REPORT_FILE).is_file():
        lines.append(f"look at it:     {folder / REPORT_FILE}")
    if (folder / "tensorboard").is_dir():
        lines.append(f"or in:          tensorboard --logdir {folder}")
    if (folder / "profile").is_dir():
        lines += [f"its profile:    lockstep profile view {folder}", *shares.table(folder / "profile")]
    return lines


def outcome(summary: Mapping[str, Any]) -> str:
    """Status, step, time and metrics. What is missing from the summary is left out."""
    told = [f"epoch {summary.get('epoch', '?')}, step {summary.get('step', '?')}"]
    if isinstance(seconds := summary.get("seconds"), (int, float)):
        told[0] += f" in {seconds:.1f} s"
    metrics = summary.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, (int, float)):
            told.append(f"{name} {value:.4g}")
    return f"{summary.get('status', 'ended')}: {'  '.join(told)}"
