"""What goes over a connection to the store: frames of byte strings, with limits on all of it, and their seals.

Nothing here trusts what it reads: a frame that is too long, cut short or wrongly sealed is a `Malformed`, and whoever
gets that closes the connection.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = MAX_VALUE_BYTES + 64 * 1024
MAX_PARTS = 100_000
_LENGTH_BYTES = 4
_SEAL_BYTES = 16


class Malformed(ValueError):
    """Bytes that are no message of ours."""


def pack(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "big") + part for part in parts)


def unpack(body: bytes) -> list[bytes]:
    parts: list[bytes] = []
    position = 0
    while position < len(body):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(body[position:start], "big")
        if end > len(body) or len(parts) >= MAX_PARTS:
            raise Malformed("a message that does not add up")
        parts.append(body[start:end])
        position = end
    if not parts:
        raise Malformed("an empty message")
    return parts


class Seal:
    """Shows of every frame in one direction that it is from who was let in, and in its place among the others.

    Over a Unix socket the system vouches for the other side, and frames go without (`key` is None).
    """

    def __init__(self, key: bytes | None) -> None:
        self._key, self._count = key, 0

    @property
    def size(self) -> int:
        return 0 if self._key is None else _SEAL_BYTES

    def of(self, body: bytes) -> bytes:
        if self._key is None:
            return b""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + body, hashlib.sha256)[:_SEAL_BYTES]


def frame(parts: Sequence[bytes], seal: Seal) -> bytes:
    body = pack(parts)
    if len(body) > MAX_FRAME_BYTES:
        raise Malformed(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body + seal.of(body)


def take_frame(buffer: bytearray, seal: Seal) -> list[bytes] | None:
    """The first message of what has been read so far, taken from it; None where it is not all there yet."""
    if len(buffer) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(buffer[:_LENGTH_BYTES], "big")
    if not 0 < size <= MAX_FRAME_BYTES:
        raise Malformed(f"a message of {size} bytes")
    body_end = _LENGTH_BYTES + size
    end = body_end + seal.size
    if len(buffer) < end:
        return None
    body, given = bytes(buffer[_LENGTH_BYTES:body_end]), bytes(buffer[body_end:end])
    if not hmac.compare_digest(seal.of(body), given):
        raise Malformed("a message with the wrong seal")
    del buffer[:end]
    return unpack(body)
