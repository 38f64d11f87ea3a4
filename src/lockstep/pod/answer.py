"""How a host's answer is told from what its shell says before it: start-up files may print what they like.

An answer is a line of JSON behind a record separator, as in RFC 7464; a console that is followed comes after a line of
its own.
"""

from __future__ import annotations

import json
from typing import Any

_SEPARATOR = "\x1e"
CONSOLE = b"\x1elockstep: the console begins here\n"


def encoded(answer: dict[str, Any]) -> str:
    return f"{_SEPARATOR}{json.dumps(answer)}"


def decoded(said: str) -> dict[str, Any] | None:
    """The last answer in what a command printed; of an older Lockstep, its last line."""
    _, marked, text = said.rpartition(_SEPARATOR)
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[0 if marked else -1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


class ConsoleStart:
    """Takes from a stream what comes before a console."""

    def __init__(self) -> None:
        self._before: bytes | None = b""

    def rest(self, data: bytes) -> bytes:
        """What of the next piece belongs to the console."""
        if self._before is None:
            return data
        before, found, rest = (self._before + data).partition(CONSOLE)
        self._before = None if found else before
        return rest

    @property
    def instead(self) -> bytes:
        """What was said where no console came."""
        return self._before or b""
