"""What libtpu says where a program does not fit: how much it would have needed, and what for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_USED = re.compile(r"Used (?P<used>[\d.]+[KMGT]?) of (?P<capacity>[\d.]+[KMGT]?) hbm", re.IGNORECASE)
_PART = re.compile(r"^\s*(?P<name>program|arguments)\s+(?P<size>[\d.]+[KMGT]?)B?\s*$", re.MULTILINE)
_ALLOCATION = re.compile(r"^\s*\d+\. Size: (?P<size>[\d.]+[KMGT]?)B?\s*$", re.MULTILINE)
_SHAPE = re.compile(r"Shape: (?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)"(?: source_line=(?P<line>\d+))?')
_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_TIMES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST = 10


@dataclass(frozen=True)
class Refused:
    capacity: int
    program: int
    arguments: int  # 0 where it does not count them, as for a slice that is not there
    largest: list[dict[str, Any]]


def refused(text: str) -> Refused | None:
    """None where something else is wrong."""
    used = _USED.search(text)
    if used is None:
        return None
    parts = {each["name"]: size(each["size"]) for each in _PART.finditer(text)}
    arguments = parts.get("arguments", 0)
    found = list(_ALLOCATION.finditer(text))
    ends = [each.start() for each in found[1:]] + [len(text)]
    return Refused(
        size(used["capacity"]),
        parts.get("program", size(used["used"]) - arguments),
        arguments,
        [_allocation(each["size"], text[each.end() : end]) for each, end in zip(found, ends, strict=True)][:_MOST],
    )


def size(text: str) -> int:
    return round(float(text.rstrip("KMGT")) * _TIMES[text[-1] if text[-1] in "KMGT" else ""])


def _allocation(written: str, rest: str) -> dict[str, Any]:
    shape, source, name = _SHAPE.search(rest), _SOURCE.search(rest), _NAME.search(rest)
    return {
        "bytes": size(written),
        "shape": [int(each) for each in shape["dims"].split(",") if each] if shape else [],
        "dtype": shape["type"] if shape else "",
        "operation": name["name"] if name else "",
        "line": f"{source['file']}:{source['line']}" if source and source["line"] else "",
    }
