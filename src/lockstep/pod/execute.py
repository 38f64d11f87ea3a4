"""Carries out commands: several at once, each with its output kept apart and a limit."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from lockstep.pod.transport import Command

_AT_ONCE = 32


@dataclass(frozen=True)
class Done:
    """A command that has ended: 124 where it took too long."""

    command: Command
    code: int
    out: str
    errors: str


def execute(commands: Sequence[Command], limit: float) -> list[Done]:
    """Run all of them at once; what became of each, in their order."""
    if not commands:
        return []
    with ThreadPoolExecutor(min(len(commands), _AT_ONCE)) as pool:
        return list(pool.map(lambda command: _run(command, limit), commands))


def _run(command: Command, limit: float) -> Done:
    with files(command) as (given, taken):
        try:
            ended = subprocess.run(
                command.argv, stdin=given, stdout=taken, stderr=subprocess.PIPE, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return Done(command, 124, "", f"no answer within {limit:g} s")
        except FileNotFoundError as error:
            return Done(command, 127, "", f"{error.filename}: not found on this machine")
    out = ended.stdout.decode(errors="replace") if ended.stdout is not None else ""
    return Done(command, ended.returncode, out, ended.stderr.decode(errors="replace"))


@contextlib.contextmanager
def files(command: Command) -> Iterator[tuple[int | IO[bytes], int | IO[bytes]]]:
    """What a command reads and writes."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(command.reads.open("rb")) if command.reads else subprocess.DEVNULL
        taken = stack.enter_context(command.writes.open("wb")) if command.writes else subprocess.PIPE
        yield given, taken
