"""How two sides of a TCP connection show each other that they know the secret of the run, without saying it.

Each sends a fresh number, and proves the secret over both. The server proves it first, so that a rank with another
secret can say so. From both numbers come the keys that every later frame is sealed with: nobody in between can add one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from lockstep.distributed.store.wire import Malformed, Seal
from lockstep.errors import RollCallError

VARIABLE = "LOCKSTEP_SECRET"
SHORTEST = 16
_GREETING = b"LSSTORE1"
_NONCE_BYTES = _PROOF_BYTES = 32
HELLO_BYTES = len(_GREETING) + _NONCE_BYTES
CHALLENGE_BYTES = _NONCE_BYTES + _PROOF_BYTES
ANSWER_BYTES = _PROOF_BYTES


@dataclass(frozen=True)
class Handshake:
    """What both sides know once they have each other's numbers."""

    key: bytes
    nonces: bytes

    def proof(self, side: bytes) -> bytes:
        return hmac.digest(self.key, side + b" proves " + self.nonces, hashlib.sha256)

    def proves(self, side: bytes, given: bytes) -> bool:
        return hmac.compare_digest(self.proof(side), given)

    def seal(self, side: bytes) -> Seal:
        """Of the frames that a side sends."""
        return Seal(hmac.digest(self.key, side + b" seals " + self.nonces, hashlib.sha256))


def hello() -> bytes:
    return _GREETING + secrets.token_bytes(_NONCE_BYTES)


def challenge(secret: str, received: bytes) -> tuple[Handshake, bytes]:
    """The server's answer to a hello."""
    if len(received) != HELLO_BYTES or not received.startswith(_GREETING):
        raise Malformed("it does not speak as ranks do")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    shaken = Handshake(_key(secret), received[len(_GREETING) :] + nonce)
    return shaken, nonce + shaken.proof(b"server")


def answer(secret: str, sent: bytes, received: bytes) -> Handshake | None:
    """The client's view of a challenge; None where the server does not know the same secret."""
    nonce, proof = received[:_NONCE_BYTES], received[_NONCE_BYTES:]
    shaken = Handshake(_key(secret), sent[len(_GREETING) :] + nonce)
    return shaken if shaken.proves(b"server", proof) else None


def fresh() -> str:
    return secrets.token_hex(32)


def from_file() -> str | None:
    """The secret that a user keeps for runs on several hosts, the same on all of them."""
    file = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lockstep" / "secret"
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
