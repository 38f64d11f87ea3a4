"""JSON that others wrote, and may be writing: whole files and lines of them, as far as they can be read."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.text_file import LONGEST_RECORD, open_regular, read_text

# What one line may have: a row of ten thousand metrics has less than a megabyte.
_LONGEST_LINE = 16_000_000


def read_json(file: Path) -> dict[str, Any]:
    """What a file says; nothing where there is none, or half of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_text(file, LONGEST_RECORD))
        return found if isinstance(found, dict) else {}
    return {}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is no object, as a last line that is still being written, is left
    out."""
    decode = json.JSONDecoder().decode  # there may be a hundred thousand of them
    with contextlib.suppress(OSError), open_regular(file) as stream:
        while line := stream.readline(_LONGEST_LINE):
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
