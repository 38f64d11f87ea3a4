"""Puts a question to a process of its own: one that hangs or crashes costs an answer, not the asker.

The process says at every stage what it does, so that a wait that ends at its limit has a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lockstep.distributed.failure import describe_exit
from lockstep.distributed.topology import without_place

# How long a process that was killed may take to be gone; one that waits for a driver never is.
_KILL_SECONDS = 5.0
_SHOWN_LINES = 3

# How the process says what it does next.
Stage = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """What the process answered, or why it did not."""

    value: dict[str, Any] | None
    trouble: str = ""
    late: bool = False
    module: str = ""  # the package that the trouble is about, where it is known


class Question:
    """A process that was started to answer; leaving the block ends it."""

    def __init__(self, topic: str, *arguments: object, limit: float) -> None:
        self._limit = limit
        self._deadline = time.monotonic() + limit
        # Files, not pipes: nobody has to read along for the process to get on.
        self._out, self._err = tempfile.TemporaryFile("w+b"), tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.doctor.answer", topic, *map(str, arguments)],
            stdin=subprocess.PIPE,  # never written to; its end tells the process that nobody waits any more
            stdout=self._out,
            stderr=self._err,
            env=environment(),
            process_group=0,  # so that what it starts can be ended with it
        )

    def __enter__(self) -> Question:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        for file in (self._out, self._err, self._process.stdin):
            if file is not None:
                file.close()

    def answer(self) -> Answer:
        """Wait for it, for as long as is left of the limit."""
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            self._end()
        said = [json.loads(line) for line in self._read(self._out).splitlines() if line.endswith("}")]
        for message in said:
            if "answer" in message:
                return Answer(message["answer"])
            if "trouble" in message:
                return Answer(None, message["trouble"], module=message.get("module", ""))
        stages = [message["stage"] for message in said]
        return Answer(None, unanswered(code, self._limit, stages, self._read(self._err)), code is None)

    def _end(self) -> None:
        """With everything that it started, also where it has already left itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)

    @staticmethod
    def _read(file: Any) -> str:
        file.seek(0)
        return str(file.read().decode(errors="replace"))


def unanswered(code: int | None, limit: float, stages: list[str], errors: str) -> str:
    """Why there is no answer, from how the process ended (None: not in time), how far it got and what it printed."""
    at = stages[-1] if stages else "starting Python"
    if code is None:
        return f"{at} did not end within {limit:g} s"
    last = [line.strip() for line in errors.splitlines() if line.strip()][-_SHOWN_LINES:]
    return f"{at}: the process ended: {describe_exit(code)}" + (f" ({' | '.join(last)})" if last else "")


def environment() -> dict[str, str]:
    """Modules are found where this process finds them, in the same order; a rank of this process is not passed on."""
    return {**without_place(os.environ), "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}  # noqa: PTH109
