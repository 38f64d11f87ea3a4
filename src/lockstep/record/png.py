"""PNG files of 8-bit pixels, by zlib alone: samples are kept whatever else is installed."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> as PNG numbers gray, RGB and RGBA


def encoded(pixels: NDArray[np.uint8]) -> bytes:
    """An array [height, width, channels] as a PNG file; channels are 1, 3 or 4."""
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # a line begins with its filter, which is none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, data) for kind, data in parts)


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
