"""What is shown of the checks: a line each for people, an object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from lockstep.config.plain import finite
from lockstep.doctor.check import Check, Verdict, overall
from lockstep.shown import visible

_SHOWN: dict[Verdict, str] = {"ok": "ok", "none": "-", "warn": "warn", "fail": "fail"}
_COLOURS: dict[Verdict, str] = {"ok": "green", "none": "bright_black", "warn": "yellow", "fail": "red"}
_VERDICT_WIDTH, _NAME_WIDTH = 4, 17
_INDENT = " " * (_VERDICT_WIDTH + 2)


def text(check: Check) -> str:
    """Verdict, name and what was found; the remedy on a line of its own. Colours are for a terminal to show."""
    first, *more = visible(check.found).splitlines() or [""]
    verdict = click.style(_SHOWN[check.verdict].ljust(_VERDICT_WIDTH), fg=_COLOURS[check.verdict])
    lines = [f"{verdict}  {check.name.ljust(_NAME_WIDTH)}  {first}".rstrip()]
    lines += [f"{_INDENT}{line}".rstrip() for line in more]
    lines += [f"{_INDENT}remedy: {visible(check.remedy)}"] if check.remedy else []
    return "\n".join(lines)


def conclusion(checks: Sequence[Check]) -> str:
    failed = [check.name for check in checks if check.verdict == "fail"]
    warned = [check.name for check in checks if check.verdict == "warn"]
    if failed:
        return f"does not work: {', '.join(failed)}"
    return "everything works" + (f"; worth a look: {', '.join(warned)}" if warned else "")


def as_json(checks: Sequence[Check]) -> str:
    """Without NaN, which JSON does not have."""
    everything = {"verdict": overall(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(finite(everything), indent=2)
