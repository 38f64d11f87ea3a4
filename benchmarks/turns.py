"""Several measurements of one GPU at once: all compile together, and are measured one after another.

Compiling takes most of a measurement's time and little of the GPU. A child process compiles, then waits in
`begin()` until every other child is ready or gone, and until its turn has come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "LOCKSTEP_BENCH_TURNS"


def begin(device: Any) -> None:
    """Waits for this process's turn."""
    if FOLDER in os.environ:
        wait(device)
        (Path(os.environ[FOLDER]) / "ready").touch()
        while not (Path(os.environ[FOLDER]) / "go").exists():
            time.sleep(0.02)


def end(device: Any) -> None:
    """Lets the next process begin."""
    if FOLDER in os.environ:
        wait(device)
        (Path(os.environ[FOLDER]) / "done").touch()


def wait(device: Any) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def taken(
    commands: Mapping[str, Sequence[str]], folder: Path, limit: float, at_once: bool = False, **variables: str
) -> Iterator[tuple[str, str | None]]:
    """Starts all commands, lets each measure when all are ready, and yields each name with what it failed by.

    A command is ended as soon as it has measured. `at_once` lets all go on together.
    """
    own = {name: Path(tempfile.mkdtemp(prefix="turn-", dir=folder)) for name in commands}
    deadline = time.monotonic() + limit
    running = {}
    for name, command in commands.items():
        with (own[name] / "output").open("w", encoding="utf-8") as stream:
            running[name] = subprocess.Popen(
                command, env={**os.environ, **variables, FOLDER: str(own[name])}, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    try:
        for name, process in running.items():
            _await(process, own[name] / "ready", deadline)
        print(f"{deadline - time.monotonic():.0f} s are left to measure", file=sys.stderr, flush=True)
        for each in own.values() if at_once else ():
            (each / "go").touch()
        for name, process in running.items():
            (own[name] / "go").touch()
            _await(process, own[name] / "done", deadline)
            _end(process)
            output = (own[name] / "output").read_text(encoding="utf-8", errors="replace")
            yield name, None if (own[name] / "done").exists() else f"exit code {process.poll()}\n{output[-3000:]}"
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _await(process: subprocess.Popen[Any], file: Path, deadline: float) -> None:
    while process.poll() is None and not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
