"""Plain data and text: JSON values, columns, similar names, files in UTF-8."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import run_files


def finite(value: Any) -> Any:
    """Returns plain data with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_LARGEST, _MOST = 1e290, 10**15  # what is computed of such numbers is finite, too, and exact as a float


def number(value: Any) -> float | None:
    """Returns a finite number of JSON, or None."""
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)


def whole(value: Any) -> int | None:
    return value if type(value) is int and -_MOST < value < _MOST else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def leaves(node: Any, at: str = "", into_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields every value of nested mappings with its path, such as `train.epochs`; a list is a value, or `betas[0]`."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{at}.{key}" if at else str(key), into_lists)
    elif into_lists and isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from leaves(value, f"{at}[{index}]", into_lists)
    else:
        yield at, node


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows of cells and returns them as lines."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Returns the most similar name, or one with these initials: `lr` and `learning_rate`."""
    names = list(valid)
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if found:
        return found[0]
    return next((each for each in names if name == _initials(each) or each == _initials(name)), None)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns the end of a sentence: the nearest name, or all valid ones."""
    names = list(valid)
    found = nearest(name, names)
    if found:
        return f"did you mean {found}?"
    return f"valid are {', '.join(names)}" if names else "there are none"


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def in_home(path: str) -> str:
    """Expands a leading ~, which no shell does in a config, nor in `--out=~/runs`."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ValueError("there is no home folder of that user on this machine") from None


LONGEST_CONFIG = 1_000_000


def read_text(path: Path, longest: int = LONGEST_CONFIG) -> str:
    """Returns the text of a file; raises OSError where it cannot be read or is not UTF-8."""
    return run_files.read_text(path, longest, depth=0)


def read_bytes(path: Path, longest: int) -> bytes:
    return run_files.read_bytes(path, longest, depth=0)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError, which a write leaves out."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
