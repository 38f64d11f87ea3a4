"""Carries out commands: several at once, each with its output kept apart and a limit."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from lockstep.launchers.ssh.transport import Command

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


class UnderWay:
    """Commands that were started; their output is read once it is asked for."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands
        self._processes = [
            subprocess.Popen(each.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for each in commands
        ]

    def done(self, limit: float) -> list[Done]:
        with ThreadPoolExecutor(len(self.commands)) as pool:
            return list(pool.map(_ended, self.commands, self._processes, itertools.repeat(limit)))

    def end(self) -> None:
        """What is still at work is not needed any more."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                process.communicate()


def _run(command: Command, limit: float) -> Done:
    with files(command) as (given, taken):
        try:
            process = subprocess.Popen(command.argv, stdin=given, stdout=taken, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            return Done(command, 127, "", f"{error.filename}: not found on this machine")
        return _ended(command, process, limit)


def _ended(command: Command, process: subprocess.Popen[bytes], limit: float) -> Done:
    with process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return Done(command, 124, "", f"no answer within {limit:g} s")
        except BaseException:
            process.kill()
            raise
    return Done(command, process.returncode, (out or b"").decode(errors="replace"), errors.decode(errors="replace"))


@contextlib.contextmanager
def files(command: Command) -> Iterator[tuple[int | IO[bytes], int | IO[bytes]]]:
    """What a command reads and writes."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(command.reads.open("rb")) if command.reads else subprocess.DEVNULL
        taken = stack.enter_context(command.writes.open("wb")) if command.writes else subprocess.PIPE
        yield given, taken
