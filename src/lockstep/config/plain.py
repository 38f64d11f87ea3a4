"""Plain data for JSON that every program reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def finite(value: Any) -> Any:
    """With null for numbers that JSON does not have: NaN and the infinite."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of nested mappings with its path, such as `train.epochs`; lists are values."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{at}.{key}" if at else str(key))
    else:
        yield at, node


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, one below the other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
