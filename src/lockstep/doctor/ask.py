"""Asks a question in a subprocess: a driver that hangs or a library that crashes costs one answer, not the doctor.

The subprocess reports every stage it reaches, so that a wait that times out has a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from lockstep.distributed.failure import describe_exit
from lockstep.distributed.topology import without_place
from lockstep.doctor.check import Check
from lockstep.errors import LockstepError

_KILL_SECONDS = 5.0  # a process that waits for a driver may never be gone
_SHOWN_LINES = 3
_REPLY = "import sys; from lockstep.doctor.ask import reply; reply(*sys.argv[1:])"
Stage = Callable[[str], None]  # how the subprocess reports what it does next


@dataclass(frozen=True)
class Answer:
    """The subprocess's answer, or why there is none."""

    value: dict[str, Any] | None
    problem: str = ""


class Question:
    """A subprocess that was started to answer; leaving the block ends it."""

    def __init__(self, topic: str, *arguments: object, limit: float) -> None:
        self._limit = limit
        self._deadline = time.monotonic() + limit
        # Files, not pipes: a full pipe would block the subprocess.
        self._out, self._err = tempfile.TemporaryFile("w+b"), tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _REPLY, topic, *map(str, arguments)],
            stdin=subprocess.PIPE,  # never written to; its end tells the subprocess that nobody waits any more
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
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            self._end()
        messages = [json.loads(line) for line in self._read(self._out).splitlines() if line.endswith("}")]
        for message in messages:
            if "answer" in message:
                return Answer(message["answer"])
            if "problem" in message:
                return Answer(None, message["problem"])
        stages = [message["stage"] for message in messages]
        return Answer(None, unanswered(code, self._limit, stages, self._read(self._err)))

    def check(self, name: str, remedy: str) -> Check:
        """Returns the check that the subprocess made, or one with its problem and a remedy."""
        answer = self.answer()
        if answer.value is None:
            return Check(name, "fail", answer.problem, "" if answer.problem.startswith("--out") else remedy)
        return Check(**answer.value)

    def _end(self) -> None:
        """Ends it with everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)

    @staticmethod
    def _read(file: Any) -> str:
        file.seek(0)
        return str(file.read().decode(errors="replace"))


def unanswered(code: int | None, limit: float, stages: list[str], errors: str) -> str:
    """Says why there is no answer, from the exit code (None: timed out), the stages it reached and what it printed."""
    at = stages[-1] if stages else "starting Python"
    if code is None:
        return f"{at} did not end within {limit:g} s"
    last = [line.strip() for line in errors.splitlines() if line.strip()][-_SHOWN_LINES:]
    return f"{at}: the process ended: {describe_exit(code)}" + (f" ({' | '.join(last)})" if last else "")


def environment() -> dict[str, str]:
    """Returns an environment with the import path of this process and without its rank."""
    return {**without_place(os.environ), "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}  # noqa: PTH109


def reply(topic: str, *arguments: str) -> None:
    """Runs in the subprocess: writes one JSON message per line to standard output, and exits."""
    channel = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    stages = ["starting"]

    def tell(**message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    def stage(name: str) -> None:
        stages.append(name)
        tell(stage=name)

    from lockstep.doctor import machine, runtimes

    topics: dict[str, Callable[..., Any]] = {
        "dependencies": machine.import_dependencies,
        "disk": machine.write_to_disk,
        "bucket": machine.write_to_bucket,
        "runtime": runtimes.take_step,
        "processes": runtimes.start_processes,
    }
    try:
        found = topics[topic](stage, *arguments)
        tell(answer=asdict(found) if isinstance(found, Check) else found)
    except LockstepError as error:
        tell(problem=str(error))
    except Exception as error:
        tell(problem=f"{stages[-1]}: {type(error).__name__}: {error}")
    os._exit(0)  # a library that hangs or crashes at exit does not change the answer


def _exit_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)
