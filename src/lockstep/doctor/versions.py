"""Which versions Lockstep supports, and what a version that was found means.

The ranges are those of pyproject.toml, which is not there once the package is installed; a test holds them equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Range:
    """From `low`, up to but without `high`; both are minor versions."""

    low: str
    high: str

    def __str__(self) -> str:
        return f">={self.low},<{self.high}"


PYTHON = Range("3.11", "3.14")
TORCH = Range("2.9", "2.16")


def minor(version: str) -> tuple[int, int]:
    """Major and minor number; a version that has none is older than any."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def place(version: str, supported: Range) -> Literal["older", "inside", "newer"]:
    if minor(version) < minor(supported.low):
        return "older"
    return "inside" if minor(version) < minor(supported.high) else "newer"


def fit_together(torch: str, torch_xla: str) -> bool:
    """torch_xla is built against one minor version of torch and crashes with any other."""
    return minor(torch) == minor(torch_xla)
