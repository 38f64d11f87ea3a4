"""What one look at the machine found, and what all looks together come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# `none`: simply not here, and nobody asked for it.
Verdict = Literal["ok", "none", "warn", "fail"]
_BY_WEIGHT: tuple[Verdict, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """One look: its verdict, what was found and, where that is not well, what to do."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def overall(checks: Iterable[Check]) -> Verdict:
    """The gravest verdict of all; what is not here weighs nothing."""
    present = [check.verdict for check in checks if check.verdict != "none"]
    return max(present, key=_BY_WEIGHT.index, default="ok")


def exit_code(verdict: Verdict) -> int:
    """A warning is not a failure: what was asked for works."""
    return 1 if verdict == "fail" else 0
