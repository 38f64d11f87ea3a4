"""Two runs side by side: where their configs differ, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep import run_files
from lockstep.config.changes import Change, changes
from lockstep.config.load import parse_yaml
from lockstep.config.plain import columns
from lockstep.config.text_file import LONGEST_CONFIG
from lockstep.errors import ConfigError
from lockstep.record import run_folder
from lockstep.runs.findings import duration
from lockstep.runs.table import SCRIPT_FILE, Listed, listed
from lockstep.shown import brief, in_a_line

_RESULTS = ("status", "epoch", "step", "seconds", "world_size", "runtime", "strategy", "samples_per_second")
_LONGEST = 60  # of a value in the table; JSON has all of it


@dataclass(frozen=True)
class Differences:
    """What `lockstep runs diff` shows."""

    runs: tuple[Listed, Listed]
    config: list[Change]
    results: dict[str, tuple[Any, Any]]  # by name, of either run: None where one has no such thing

    def plain(self) -> dict[str, Any]:
        return {
            "runs": [str(each.folder) for each in self.runs],
            "config": [{"key": each.path, "values": [each.before, each.after]} for each in self.config],
            "results": {name: list(values) for name, values in self.results.items()},
        }


def differences(first: Path, second: Path) -> Differences:
    """Of two runs' folders."""
    before, after = _settings(first), _settings(second)
    runs = (listed(first), listed(second))
    found = _results(runs[0]), _results(runs[1])
    names = dict.fromkeys([*found[0], *found[1]])
    return Differences(runs, changes(before, after), {name: (found[0].get(name), found[1].get(name)) for name in names})


def lines(found: Differences) -> list[str]:
    """A table of what differs in the configs, and one of all results."""
    heads = [in_a_line(each.folder.name) for each in found.runs]
    config = [(each.path, _text(each.before), _text(each.after)) for each in found.config]
    results = [(name, _result(name, a), _result(name, b)) for name, (a, b) in found.results.items()]
    told = columns([("config", *heads), *config]) if config else ["the configs are the same"]
    return [*told, "", *columns([("result", *heads), *results])]


def _settings(folder: Path) -> dict[str, Any]:
    """The config of a run, or how the script of its own loop was started."""
    if (folder / run_folder.CONFIG_FILE).exists():
        return run_folder.read_plain_config(folder)
    file = folder / SCRIPT_FILE
    try:
        known = parse_yaml(run_files.read_text(file, LONGEST_CONFIG))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    return known if isinstance(known, dict) else {}


def _results(run: Listed) -> dict[str, Any]:
    summary = run_folder.read_summary(run.folder)
    told: dict[str, Any] = {name: summary.get(name) for name in _RESULTS}
    told |= {"status": run.status, "step": run.step, "seconds": run.seconds}
    if run.best is not None:
        told[f"best {run.metric or ''}".strip()] = run.best
        told["best at step"] = run.best_step
    metrics = summary.get("metrics")
    return {**told, **(metrics if isinstance(metrics, Mapping) else {})}


def _result(name: str, value: Any) -> str:
    if name == "seconds" and isinstance(value, (int, float)):
        return duration(value)
    return f"{value:.6g}" if isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    return "-" if value is None else brief(in_a_line(str(value)), _LONGEST)
