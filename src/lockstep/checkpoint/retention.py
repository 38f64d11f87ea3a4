"""Decides which checkpoints to keep, and which is the best, by what is there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lockstep import run_files
from lockstep.config.plain import text
from lockstep.config.yaml_text import parse_yaml


@dataclass(frozen=True)
class Saved:
    """What retention needs to know of a checkpoint."""

    step: int
    value: float | None = None  # the metric that best is judged by
    whole: bool = True  # as far as its manifest and the sizes of its files tell


def judged_by(folder: Path) -> tuple[str | None, str]:
    """Returns the metric that the best checkpoint of a run is chosen by, and whether its lowest or its highest value is
    the best, as far as the config says."""
    for file in ("config.yaml", "launch.yaml"):  # of a run with a task, and with a custom loop
        with contextlib.suppress(OSError, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError):
            given = parse_yaml(run_files.read_text(folder / file))
            keep = given.get("settings", given)["checkpoint"]["keep"]
            metric = None if "settings" in given else text(keep.get("metric"))  # a custom loop names no metric
            return metric or None, "max" if keep.get("mode") == "max" else "min"
    return None, "min"


def best_first(saved: Sequence[Saved], mode: str) -> list[Saved]:
    """Returns those with a value, best first; of equals the earlier."""
    sign = 1 if mode == "min" else -1
    judged = [each for each in saved if each.value is not None and each.value == each.value]
    return sorted(judged, key=lambda each: (sign * (each.value or 0.0), each.step))


def to_delete(saved: Sequence[Saved], keep_last: int, keep_best: int, mode: str) -> list[int]:
    """Returns the steps whose checkpoints are neither among the newest nor among the best.

    One that is not whole does not count: it neither takes the place of a good one nor is deleted.
    """
    whole = sorted((each for each in saved if each.whole), key=lambda each: each.step)
    newest = whole[-max(keep_last, 1) :]
    kept = {each.step for each in [*newest, *best_first(whole, mode)[:keep_best]]}
    return [each.step for each in whole if each.step not in kept]
