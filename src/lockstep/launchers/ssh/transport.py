"""How commands and files reach the workers of a pod: as data, so that `--dry-run` can print what would be done."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.shown import visible


@dataclass(frozen=True)
class Command:
    """A command of this machine that reaches one worker, or the pod as a whole."""

    argv: tuple[str, ...]
    worker: int | None = None  # whose output it is; None: of the pod as a whole, or of all workers at once
    reads: Path | None = None  # what it is given on standard input
    writes: Path | None = None  # where its standard output goes

    def render(self) -> str:
        """Quoted, ready to paste."""
        reads = f" < {pasteable(str(self.reads))}" if self.reads is not None else ""
        writes = f" > {pasteable(str(self.writes))}" if self.writes is not None else ""
        return " ".join(map(pasteable, self.argv)) + reads + writes


def pasteable(argument: str) -> str:
    """An argument as a shell takes it: exact, and of characters alone that a terminal shows and does not obey."""
    if visible(argument) == argument:
        return shlex.quote(argument)
    return f"$'{''.join(map(_escaped, argument))}'"


def _escaped(character: str) -> str:
    """In $'...', which bash, zsh and ksh know; octal, since that is three digits in all of them."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


class Transport(Protocol):
    """What reaches the workers: OpenSSH's client, or gcloud. Every method says what to run and runs nothing."""

    @property
    def workers(self) -> tuple[str, ...]:
        """What messages call them, in order."""
        ...

    def create(self) -> list[Command]:
        """What makes the hosts; nothing where they are there already."""
        ...

    def delete(self) -> list[Command]:
        """What gives the hosts back; nothing where they stay."""
        ...

    def run(self, argv: Sequence[str], worker: int | None = None) -> list[Command]:
        """Run a command on a worker, or on all of them; every argument arrives there as it is."""
        ...

    def copy(self, file: Path, to: str, worker: int | None = None) -> list[Command]:
        """Bring a file to a worker, or to all; `to` is relative to the home folder there, or absolute."""
        ...

    def fetch(self, path: str, to: Path, worker: int) -> list[Command]:
        """Bring a file of a worker here."""
        ...

    def explain(self, command: Command, code: int, errors: str) -> str:
        """Why a command failed, and what to do: of its exit code and what it said."""
        ...


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
