"""One check of the doctor, and how checks are shown: a line each for people, an object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import click

from lockstep.config.plain import finite
from lockstep.shown import visible

Verdict = Literal["ok", "none", "warn", "fail"]  # none: not here, and nobody asked for it
_BY_WEIGHT: tuple[Verdict, ...] = ("ok", "warn", "fail")
_COLOURS: dict[Verdict, str] = {"ok": "green", "none": "bright_black", "warn": "yellow", "fail": "red"}
_INDENT = " " * 6


@dataclass(frozen=True)
class Check:
    """A verdict, what was found and, if that is not good, what to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """Returns the worst verdict; what is not here does not count."""
    return max((check.verdict for check in checks if check.verdict != "none"), key=_BY_WEIGHT.index, default="ok")


def text(check: Check) -> str:
    first, *more = visible(check.found).splitlines() or [""]
    shown = "-" if check.verdict == "none" else check.verdict
    lines = [f"{click.style(shown.ljust(4), fg=_COLOURS[check.verdict])}  {check.name.ljust(17)}  {first}".rstrip()]
    more += [f"remedy: {visible(check.remedy)}"] if check.remedy else []
    return "\n".join([*lines, *(f"{_INDENT}{line}".rstrip() for line in more)])


def conclusion(checks: Sequence[Check]) -> str:
    failed, warned = ([each.name for each in checks if each.verdict == verdict] for verdict in ("fail", "warn"))
    if failed:
        return f"does not work: {', '.join(failed)}"
    return "everything works" + (f"; worth a look: {', '.join(warned)}" if warned else "")


def as_json(checks: Sequence[Check]) -> str:
    everything = {"verdict": overall(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(finite(everything), indent=2)


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
