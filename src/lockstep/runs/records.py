"""JSON that others wrote, and may be writing: whole files and lines of them, as far as they can be read."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep import run_files


def read_json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where there is none, or half of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(run_files.read_text(file))
        return found if isinstance(found, dict) else {}
    return {}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is no object, as a last line that is still being written, is left
    out."""
    decode = json.JSONDecoder().decode  # there may be a hundred thousand of them
    with contextlib.suppress(OSError), run_files.open_file(file) as stream:
        for _, line in run_files.lines(stream):
            try:
                found = decode(line.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def number(value: Any) -> float | None:
    """A finite number, or none."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    return value if type(value) is int else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""
