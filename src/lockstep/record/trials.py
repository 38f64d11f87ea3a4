"""The trials of a sweep: status, best trial and table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.load import read, to_yaml, validate
from lockstep.config.plain import LONGEST_CONFIG, columns, number, text, whole
from lockstep.config.sweep import Sweep
from lockstep.errors import ConfigError
from lockstep.record import run_folder
from lockstep.shown import brief, in_a_line

SWEEP_FILE, BEST_FILE, DEFINITION_FILE = "sweep.json", "best.yaml", "sweep.yaml"
TO_THE_END = ("completed", "stopped early")
_ENDED = (*TO_THE_END, "pruned", "failed")


@dataclass(frozen=True)
class Trial:
    number: int
    values: Mapping[str, Any]
    status: str  # completed, stopped early, pruned, failed; or queued, running, preempted, interrupted
    epoch: int | None
    metric: float | None
    cause: str = ""

    @property
    def folder(self) -> str:
        return trial_folder(self.number)

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED


def trial_folder(number: int) -> str:
    return f"trial-{number:05d}"


def definition(sweep: Sweep) -> str:
    """Returns a sweep as text, without how many of its trials run at once."""
    return "# What was swept over. `lockstep sweep` reads it.\n" + to_yaml(
        sweep.model_dump(mode="json", exclude_unset=True, exclude={"concurrency"})
    )


def write_sweep(folder: Path, sweep: Sweep) -> None:
    run_folder.write_text(folder / DEFINITION_FILE, definition(sweep))


def read_sweep(folder: Path) -> Sweep:
    file = folder / DEFINITION_FILE
    if not run_files.is_file(file):
        there = "there is no such folder" if not folder.is_dir() else f"it holds no {DEFINITION_FILE}"
        raise ConfigError(f"{folder} is not the folder of a sweep: {there}")
    raw, places = read(file)
    return validate(Sweep, raw, places, str(file))


def read_trials(folder: Path, metric: str) -> list[Trial]:
    """Returns the trials of a sweep, each as its folder describes it now."""
    file = folder / SWEEP_FILE
    try:
        listed = json.loads(run_files.read_text(file))
        trials = [_trial(each) for each in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file}: does not list the trials of a sweep: {error}") from None
    return [as_it_is(each, folder, metric) for each in trials]


def _trial(found: Mapping[str, Any]) -> Trial:
    at, values = whole(found["number"]), found["values"]
    if at is None or not isinstance(values, dict):
        raise TypeError("a trial has a number and values")
    status, cause = text(found.get("status")), text(found.get("cause"))
    return Trial(at, values, status, whole(found.get("epoch")), number(found.get("metric")), cause)


def as_it_is(trial: Trial, folder: Path, metric: str) -> Trial:
    summary = run_folder.read_summary(folder / trial.folder, depth=2)
    if not summary:
        return trial
    metrics, status = summary.get("metrics"), text(summary.get("status"))
    value = number(metrics.get(metric)) if isinstance(metrics, dict) else None
    cause = text(summary.get("reason")).strip().split("\n")[0] if status == "failed" else ""
    return replace(trial, status=status, epoch=whole(summary.get("epoch")), metric=value, cause=cause)


def write_trials(folder: Path, trials: Sequence[Trial]) -> None:
    run_folder.write_text(folder / SWEEP_FILE, json.dumps([asdict(each) for each in trials], indent=1) + "\n")


def conclude(trials: Sequence[Trial], sweep: Sweep, folder: Path, say: Callable[[str], None]) -> int:
    """Writes and prints the results; returns the exit code."""
    trials = sorted(trials, key=lambda each: each.number)
    write_trials(folder, trials)
    for line in table(_best_first(trials, sweep), sweep):
        say(line)
    best = best_of(trials, sweep)
    if best is None:
        say("no trial has come to an end that counts")
        return 5
    config = run_files.read_text(folder / best.folder / run_folder.CONFIG_FILE, LONGEST_CONFIG, depth=2)
    run_folder.write_text(folder / BEST_FILE, config)
    say(f"best: trial {best.number}, {sweep.metric} {best.metric:.4g} with {values_of(best)}")
    say(f"its config: {folder / BEST_FILE}; its run: {folder / best.folder}")
    return 0


def _best_first(trials: Sequence[Trial], sweep: Sweep) -> list[Trial]:
    sign = 1 if sweep.mode == "min" else -1
    known = [each for each in trials if number(each.metric) is not None]
    return [
        *sorted(known, key=lambda each: sign * (each.metric or 0.0)),
        *(each for each in trials if each not in known),
    ]


def best_of(trials: Sequence[Trial], sweep: Sweep) -> Trial | None:
    """Returns the best of the trials that were trained to the end, by their last metric."""
    measured = [each for each in trials if number(each.metric) is not None and each.status in TO_THE_END]
    return next(iter(_best_first(measured, sweep)), None)


def values_of(trial: Trial) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in trial.values.items())


def table(trials: Sequence[Trial], sweep: Sweep) -> list[str]:
    rows: list[Sequence[str]] = [("trial", *sweep.space, "epoch", sweep.metric, "status")]
    for each in trials:
        values = [_short(each.values.get(name)) for name in sweep.space]
        status = f"{each.status}: {each.cause}" if each.cause else each.status
        rows.append((str(each.number), *values, _short(each.epoch), _short(each.metric), status))
    return columns(rows)


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else brief(in_a_line(str(value)), 60)
