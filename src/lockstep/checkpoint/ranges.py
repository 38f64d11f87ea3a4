"""Which bytes of a file a block of a tensor takes, and reading, writing and digesting just those."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# What is read or written, and digested, at once.
PIECE_BYTES = 4 * 1024 * 1024
# Shorter rows are read together with what is between them: a call for each would cost more.
_SHORT_ROW = 16 * 1024
# What is digested at once when it was not written just now: so much stays near the processor.
_DIGEST_BYTES = 1024 * 1024


class Range(NamedTuple):
    """Rows of bytes, as far apart from each other as their stride."""

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
    """Where a block of a tensor is that begins at this byte, in the order of the block's own elements."""
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
    """The same bytes in the same order, in ranges of at most so many."""
    for begin, length, stride, count in ranges:
        together = most // length
        if together:
            for row in range(0, count, together):
                yield Range(begin + row * stride, length, stride, min(together, count - row))
            continue
        for row, start in itertools.product(range(count), range(0, length, most)):
            piece = min(most, length - start)
            yield Range(begin + row * stride + start, piece, piece, 1)


def from_start(descriptor: int) -> Callable[[memoryview], None]:
    """Reads on from the beginning of a file, as much at a time as it is given memory for."""
    position = 0

    def fill_next(memory: memoryview) -> None:
        nonlocal position
        count = len(memory)
        fill(descriptor, [Range(position, count, count, 1)] if count else [], memory)
        position += count

    return fill_next


def fill(descriptor: int, ranges: Iterable[Range], memory: memoryview) -> None:
    """Read these bytes of a file into memory, one after the other. Raises EOFError where the file is too short."""
    done = 0
    for each in chopped(ranges):
        target = memory[done : done + each.bytes]
        done += each.bytes
        if each.rows == 1 or each.length >= _SHORT_ROW:
            for row in range(each.rows):
                _read(descriptor, target[row * each.length : (row + 1) * each.length], each.begin + row * each.stride)
        else:
            _read_rows(descriptor, each, target)


def put(descriptor: int, ranges: Iterable[Range], memory: memoryview, seen: Callable[[memoryview], object]) -> None:
    """Write memory to these bytes of a file; `seen` gets every piece of it while the processor still has it at hand."""
    done = 0
    for each in chopped(ranges):
        piece = memory[done : done + each.bytes]
        done += each.bytes
        for row in range(each.rows):
            _write(descriptor, piece[row * each.length : (row + 1) * each.length], each.begin + row * each.stride)
        seen(piece)


def digest(descriptor: int, ranges: Iterable[Range], progress: Callable[[], object] = lambda: None) -> str:
    """SHA-256 of these bytes of a file, in this order. Raises EOFError where the file is too short."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_DIGEST_BYTES))
    for each in chopped(ranges, _DIGEST_BYTES):
        fill(descriptor, [each], piece[: each.bytes])
        found.update(piece[: each.bytes])
        progress()
    return found.hexdigest()


class Digests:
    """The digests of several parts of one file, made while it is read from its beginning to its end."""

    def __init__(self, parts: Mapping[str, Sequence[Range]]) -> None:
        self._parts = {name: _Following(ranges) for name, ranges in parts.items()}
        self._position = 0

    def update(self, piece: memoryview) -> None:
        for part in self._parts.values():
            part.update(self._position, piece)
        self._position += len(piece)

    def found(self) -> dict[str, str]:
        return {name: part.digest.hexdigest() for name, part in self._parts.items()}


class _Following:
    """One of the parts, and how far it has come."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.digest = hashlib.sha256()
        self._rows = _rows(ranges)
        self._row = next(self._rows, None)

    def update(self, position: int, piece: memoryview) -> None:
        end = position + len(piece)
        while self._row is not None and self._row[0] < end:
            first, last = max(self._row[0], position), min(self._row[1], end)
            self.digest.update(piece[first - position : last - position])
            if self._row[1] > end:
                return
            self._row = next(self._rows, None)


def _rows(ranges: Iterable[Range]) -> Iterator[tuple[int, int]]:
    for begin, length, stride, count in ranges:
        for row in range(count):
            yield begin + row * stride, begin + row * stride + length


def _read_rows(descriptor: int, rows: Range, target: memoryview) -> None:
    """Short rows by way of longer pieces of the file, with what is between them."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    together = max(1, PIECE_BYTES // rows.stride)
    between = memoryview(bytearray((min(together, rows.rows) - 1) * rows.stride + rows.length))
    for first in range(0, rows.rows, together):
        count = min(together, rows.rows - first)
        _read(descriptor, between[: (count - 1) * rows.stride + rows.length], rows.begin + first * rows.stride)
        found = as_strided(np.frombuffer(between, np.uint8), (count, rows.length), (rows.stride, 1))
        np.frombuffer(target, np.uint8).reshape(-1, rows.length)[first : first + count] = found


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
