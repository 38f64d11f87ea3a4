"""The protocol of the store: frames with limits and seals, and the handshake by which both sides prove the secret.

A frame that is too long, cut short or wrongly sealed is Malformed, and its connection is closed. In the handshake each
side sends a nonce and proves the secret over both, the server first, so that a rank with another secret can say so. The
keys of the seals are derived from both nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import RollCallError

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_FRAME_BYTES = MAX_VALUE_BYTES + 64 * 1024
MAX_PARTS = 100_000
_LENGTH_BYTES = 4
_SEAL_BYTES = 16


class Malformed(ValueError):
    """Bytes that are not a valid message."""


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
    """Authenticates every frame in one direction, and its position.

    A Unix socket needs none (`key` is None).
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
    """Removes and returns the first message of the buffer, or None if it is incomplete."""
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


VARIABLE = "LOCKSTEP_SECRET"
SHORTEST = 16
_GREETING = b"LSSTORE1"
_NONCE_BYTES = _PROOF_BYTES = 32
HELLO_BYTES = len(_GREETING) + _NONCE_BYTES
CHALLENGE_BYTES = _NONCE_BYTES + _PROOF_BYTES
ANSWER_BYTES = _PROOF_BYTES


@dataclass(frozen=True)
class Handshake:
    """The key and the nonces of both sides."""

    key: bytes
    nonces: bytes

    def proof(self, side: bytes) -> bytes:
        return hmac.digest(self.key, side + b" proves " + self.nonces, hashlib.sha256)

    def proves(self, side: bytes, given: bytes) -> bool:
        return hmac.compare_digest(self.proof(side), given)

    def seal(self, side: bytes) -> Seal:
        return Seal(hmac.digest(self.key, side + b" seals " + self.nonces, hashlib.sha256))


def hello() -> bytes:
    return _GREETING + secrets.token_bytes(_NONCE_BYTES)


def challenge(secret: str, received: bytes) -> tuple[Handshake, bytes]:
    """Returns the server's answer to a hello."""
    if len(received) != HELLO_BYTES or not received.startswith(_GREETING):
        raise Malformed("it does not speak as ranks do")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    handshake = Handshake(_key(secret), received[len(_GREETING) :] + nonce)
    return handshake, nonce + handshake.proof(b"server")


def answer(secret: str, sent: bytes, received: bytes) -> Handshake | None:
    """Checks the server's challenge; returns None if its secret differs."""
    nonce, proof = received[:_NONCE_BYTES], received[_NONCE_BYTES:]
    handshake = Handshake(_key(secret), sent[len(_GREETING) :] + nonce)
    return handshake if handshake.proves(b"server", proof) else None


def fresh() -> str:
    return secrets.token_hex(32)


def from_file() -> str | None:
    """Returns the user's secret for runs on several hosts, if there is one."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111  there may be no home
    file = Path(home) / "lockstep" / "secret"
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RollCallError(f"{file}: is not a file")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise RollCallError(f"{file}: others can read or change it, so it is no secret: chmod 600 {file}")
            text = opened.read(4096).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RollCallError(f"{file}: cannot be read: {error.strerror}") from None
    return checked(text, str(file))


def checked(text: str, source: str) -> str:
    if len(text) < SHORTEST:
        raise RollCallError(
            f"{source}: the secret of a run must have at least {SHORTEST} characters, this one has {len(text)}: "
            f"{how_to_make_one()}"
        )
    return text


def how_to_make_one() -> str:
    return "make one with `python -c 'import secrets; print(secrets.token_hex(32))'`"


def _key(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"lockstep store", hashlib.sha256)
