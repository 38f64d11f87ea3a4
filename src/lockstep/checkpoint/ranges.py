"""The bytes of a file that a block of a tensor takes, and reading, writing and digesting just those."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# What is read or written, and digested, at once.
PIECE_BYTES = 4 * 1024 * 1024
# What is digested at once when it was not written just now: so much stays near the processor.
_DIGEST_BYTES = 1024 * 1024

_LARGEST = 2**62


class Range(NamedTuple):
    """Rows of bytes, at a distance of `stride` from each other."""

    begin: int
    length: int
    stride: int
    rows: int

    @property
    def bytes(self) -> int:
        return self.length * self.rows


def of_block(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int], itemsize: int, begin: int
) -> list[Range]:
    """Returns where a block of a tensor is that begins at this byte, in the order of the block's elements."""
    if not all(size):
        return []
    partial = [axis for axis in range(len(shape)) if size[axis] != shape[axis]]
    inner = partial[-1] if partial else 0  # from this axis on, a row of the block is one piece
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    length = math.prod(size[inner:]) * itemsize
    # As many axes as lie evenly make one range of rows.
    outer, count = inner, 1
    while outer > 0 and (outer == inner or size[outer] == shape[outer]):
        outer -= 1
        count *= size[outer]
    stride = strides[inner - 1] if inner else length
    first = begin + sum(at * step for at, step in zip(offset, strides, strict=True))
    corners = itertools.product(*(range(size[axis]) for axis in range(outer)))
    return [
        Range(first + sum(at * step for at, step in zip(corner, strides, strict=False)), length, stride, count)
        for corner in corners
    ]


def total(ranges: Iterable[Range]) -> int:
    return sum(each.bytes for each in ranges)


def chopped(ranges: Iterable[Range], most: int = PIECE_BYTES) -> Iterator[Range]:
    """Yields the same bytes in the same order, in ranges of at most so many."""
    for begin, length, stride, count in ranges:
        together = most // length
        if together:
            for row in range(0, count, together):
                yield Range(begin + row * stride, length, stride, min(together, count - row))
            continue
        for row, start in itertools.product(range(count), range(0, length, most)):
            piece = min(most, length - start)
            yield Range(begin + row * stride + start, piece, piece, 1)


def fill(descriptor: int, ranges: Iterable[Range], memory: memoryview) -> None:
    """Reads these bytes of a file into memory. Raises EOFError where the file is too short."""
    done = 0
    for begin, length, stride, rows in ranges:
        for row in range(rows):
            _read(descriptor, memory[done : done + length], begin + row * stride)
            done += length


def put(descriptor: int, ranges: Iterable[Range], memory: memoryview, seen: Callable[[memoryview], object]) -> None:
    """Writes memory to these bytes of a file; `seen` gets every piece while it is still in the processor's cache."""
    done = 0
    for each in chopped(ranges):
        piece = memory[done : done + each.bytes]
        done += each.bytes
        for row in range(each.rows):
            _write(descriptor, piece[row * each.length : (row + 1) * each.length], each.begin + row * each.stride)
        seen(piece)


def digest(descriptor: int, ranges: Iterable[Range], progress: Callable[[], object] = lambda: None) -> str:
    """Returns the SHA-256 of these bytes of a file. Raises EOFError where the file is too short."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_DIGEST_BYTES))
    for each in chopped(ranges, _DIGEST_BYTES):
        fill(descriptor, [each], piece[: each.bytes])
        found.update(piece[: each.bytes])
        progress()
    return found.hexdigest()


def _read(descriptor: int, memory: memoryview, position: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], position)
        if not count:
            raise EOFError("it ends before its time")
        memory, position = memory[count:], position + count


def _write(descriptor: int, memory: memoryview, position: int) -> None:
    while memory:
        count = os.pwrite(descriptor, memory, position)
        memory, position = memory[count:], position + count


Parts = dict[str, dict[str, list[Range]]]  # file -> rank -> its ranges, in the order of the file


def parse_parts(data: bytes, files: Mapping[str, Mapping[str, Any]]) -> Parts:
    """Parses `parts.json`: for every file and rank the bytes that this rank wrote. `files` is what the manifest says.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError where it cannot be so.
    """
    given = json.loads(data)
    parts = {
        file: {rank: [_range(each, entry["bytes"]) for each in given[file][rank]] for rank in entry["sha256"]}
        for file, entry in files.items()
    }
    for file, entry in files.items():
        count = sum(total(ranges) for ranges in parts[file].values())
        if set(given[file]) != set(entry["sha256"]) or count != entry["bytes"]:
            raise ValueError(f"its parts of {file} have {count} bytes, and the file has {entry['bytes']}")
    return parts


def _range(given: Any, size: int) -> Range:
    found = Range(*given)
    begin, length, stride, count = found
    sound = all(type(each) is int and 0 <= each <= _LARGEST for each in found) and length and count
    if not sound or (count > 1 and stride < length) or begin + (count - 1) * stride + length > size:
        raise ValueError(f"{given!r} is no range of bytes of a file of {size}")
    return found
