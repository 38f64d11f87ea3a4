"""Commands that reach the workers of a pod, as data that `--dry-run` prints, and the answers of hosts."""

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
    """A command of this machine for one worker, or for the pod as a whole."""

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
    """Quotes an argument for a shell, with control characters escaped, so that a terminal shows them."""
    if visible(argument) == argument:
        return shlex.quote(argument)
    return f"$'{''.join(map(_escaped, argument))}'"


def _escaped(character: str) -> str:
    """For $'...' in bash, zsh and ksh; octal, since that is three digits in all of them."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


class Transport(Protocol):
    """OpenSSH's client, or gcloud. Every method returns the commands to run, and runs nothing."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers in messages, in order."""
        ...

    def create(self) -> list[Command]:
        """Creates the hosts; no commands where they exist already."""
        ...

    def delete(self) -> list[Command]:
        """Deletes the hosts; no commands where they stay."""
        ...

    def run(self, argv: Sequence[str], worker: int | None = None) -> list[Command]:
        """Runs a command on one worker or on all; every argument arrives unchanged."""
        ...

    def copy(self, file: Path, to: str, worker: int | None = None) -> list[Command]:
        """Copies a file to one worker or to all; `to` is absolute, or relative to the home folder there."""
        ...

    def fetch(self, path: str, to: Path, worker: int) -> list[Command]: ...

    def explain(self, command: Command, code: int, errors: str) -> str:
        """Returns why a command failed, and what to do about it."""
        ...


_SEPARATOR = "\x1e"
CONSOLE = b"\x1elockstep: the console begins here\n"


def encoded(answer: dict[str, Any]) -> str:
    return f"{_SEPARATOR}{json.dumps(answer)}"


def decoded(said: str) -> dict[str, Any] | None:
    """Returns the last answer in what a command printed, after whatever a shell printed at its start."""
    _, marked, text = said.rpartition(_SEPARATOR)
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[0]) if marked and lines else None
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


class ConsoleStart:
    """Removes from a stream what a shell printed before the console."""

    def __init__(self) -> None:
        self._before: bytes | None = b""

    def rest(self, data: bytes) -> bytes:
        if self._before is None:
            return data
        before, found, rest = (self._before + data).partition(CONSOLE)
        self._before = None if found else before
        return rest

    @property
    def instead(self) -> bytes:
        """What was printed where no console came."""
        return self._before or b""
