"""Blocks of tensors as ranges of bytes: against what numpy says, for every way to cut small tensors."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.checkpoint import ranges
from lockstep.checkpoint.ranges import Range


def blocks(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    along = [[(at, size) for at in range(length) for size in range(1, length - at + 1)] for length in shape]
    return [(tuple(at for at, _ in cut), tuple(size for _, size in cut)) for cut in itertools.product(*along)]


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 2, 4), (2, 3, 2, 3), (1, 5), (5, 1, 2)])
def test_a_block_of_a_tensor_is_found_read_and_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    file = tmp_path / "file"
    file.write_bytes(b"head" + whole.tobytes() + b"tail")
    descriptor = os.open(file, os.O_RDWR)
    try:
        for offset, size in blocks(shape):
            cut = tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))
            expected = np.ascontiguousarray(whole[cut]).tobytes()
            found = ranges.of_block(shape, offset, size, 2, 4)
            assert ranges.total(found) == len(expected)
            for most in (1, 3, 8, 1000):
                memory = bytearray(len(expected))
                ranges.fill(descriptor, ranges.chopped(found, most), memoryview(memory))
                assert memory == expected, (offset, size, found)
            assert ranges.digest(descriptor, found) == hashlib.sha256(expected).hexdigest()
            seen = bytearray()
            ranges.put(descriptor, found, memoryview(expected[::-1]), seen.extend)
            assert seen == expected[::-1]
            changed = np.frombuffer(file.read_bytes()[4:-4], dtype=np.int16).reshape(shape)
            assert np.ascontiguousarray(changed[cut]).tobytes() == expected[::-1]
            ranges.put(descriptor, found, memoryview(expected), seen.extend)
            assert file.read_bytes() == b"head" + whole.tobytes() + b"tail"
    finally:
        os.close(descriptor)


def test_what_lies_together_is_one_range() -> None:
    assert ranges.of_block((8, 6), (2, 0), (3, 6), 4, 100) == [Range(148, 72, 72, 1)]
    assert ranges.of_block((8, 6), (2, 3), (3, 2), 4, 100) == [Range(160, 8, 24, 3)]
    assert ranges.of_block((4, 8, 6), (0, 0, 2), (4, 8, 2), 1, 0) == [Range(2, 2, 6, 32)]
    assert len(ranges.of_block((4, 8, 6), (0, 1, 2), (4, 2, 2), 1, 0)) == 4
    assert ranges.of_block((4, 0), (0, 0), (4, 0), 4, 0) == []


def test_rows_that_lie_far_apart_are_read_one_by_one(tmp_path: Path) -> None:
    """Long rows and short ones, with a gap that is longer than a piece."""
    file = tmp_path / "file"
    with file.open("wb") as stream:
        stream.truncate(30_000_000)
        for row in range(3):
            stream.seek(5 + row * 9_000_000)
            stream.write(bytes([row + 1]) * 20_000)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for length in (10, 20_000):
            memory = bytearray(3 * length)
            ranges.fill(descriptor, [Range(5, length, 9_000_000, 3)], memoryview(memory))
            assert memory == b"".join(bytes([row + 1]) * length for row in range(3))
        with pytest.raises(EOFError):
            ranges.digest(descriptor, [Range(29_999_999, 2, 2, 1)])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "told",
    [
        '{"f": {"0": [[0, 8, 8, 1]]}}',
        '{"f": {"0": [[0, 11, 11, 1]]}}',
        '{"f": {"0": [[0, 5, 4, 2]]}}',
        '{"f": {"0": [[0, -1, 4, 2]]}}',
        '{"f": {"0": [[0, 10.0, 10, 1]]}}',
        '{"f": {"0": [[0, 0, 0, 1], [0, 10, 10, 1]]}}',
        '{"f": {"1": [[0, 10, 10, 1]]}}',
        '{"f": {"0": [[0, 10, 10, 1]], "1": []}}',
        '{"g": {}}',
        "[]",
        "nothing",
    ],
)
def test_parts_that_cannot_be_are_refused(told: str) -> None:
    files = {"f": {"bytes": 10, "sha256": {"0": "x"}}}
    assert ranges.parse_parts(b'{"f": {"0": [[0, 10, 10, 1]]}}', files) == {"f": {"0": [Range(0, 10, 10, 1)]}}
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        ranges.parse_parts(told.encode(), files)
