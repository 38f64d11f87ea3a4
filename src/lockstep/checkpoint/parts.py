"""`parts.json` of a checkpoint that several ranks wrote: for every file and rank the bytes that this rank wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.checkpoint.ranges import Range, total

Parts = dict[str, dict[str, list[Range]]]  # file -> rank -> its ranges, in the order of the file

_LARGEST = 2**62


def text(parts: Mapping[str, Mapping[str, Sequence[Range]]]) -> str:
    return json.dumps(parts, separators=(",", ":")) + "\n"


def parse(data: bytes, files: Mapping[str, Mapping[str, Any]]) -> Parts:
    """What the file says of these tensor files, each with its size and the digests of its parts in the manifest.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError where it cannot be so.
    """
    told = json.loads(data)
    parts = {
        file: {rank: [_range(each, entry["bytes"]) for each in told[file][rank]] for rank in entry["sha256"]}
        for file, entry in files.items()
    }
    for file, entry in files.items():
        count = sum(total(ranges) for ranges in parts[file].values())
        if set(told[file]) != set(entry["sha256"]) or count != entry["bytes"]:
            raise ValueError(f"its parts of {file} have {count} bytes, and the file has {entry['bytes']}")
    return parts


def _range(told: Any, size: int) -> Range:
    found = Range(*told)
    begin, length, stride, count = found
    sound = all(type(each) is int and 0 <= each <= _LARGEST for each in found) and length and count
    if not sound or (count > 1 and stride < length) or begin + (count - 1) * stride + length > size:
        raise ValueError(f"{told!r} is no range of bytes of a file of {size}")
    return found
