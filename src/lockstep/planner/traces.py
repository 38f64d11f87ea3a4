"""Traces of one step. `python -m lockstep.planner.traces CONFIG WORLD_SIZE OUT [KEY=VALUE ...]` writes one to a file.

Tracing patches torch, so every trace has its own process. `Traces` forks several from this process, which has torch
loaded already.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lockstep.config.load import load
from lockstep.errors import LockstepError
from lockstep.planner.figures import Step

_AT_ONCE = 8  # each needs up to a gigabyte of host memory
# Loaded before the first fork.
_LOADED = ("torch._dynamo", "torch._meta_registrations", "lockstep.planner.gpu_rules", "lockstep.planner.step")
NO_TIME = "there was no time for it"


class NotPlanned(LockstepError):
    """The step could not be traced or compiled."""

    exit_code = 2


def run_module(module: str, arguments: Sequence[str], limit: float, what: str) -> tuple[str, int]:
    """Runs `python -m MODULE` without the variables of a rank or of XLA, and returns its output and exit code."""
    left_out = ("RANK", "WORLD_SIZE", "PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryFile() as log:
        try:
            code = subprocess.run(
                [sys.executable, "-P", "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, timeout=limit, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotPlanned(f"{what} took more than {limit:g} s") from None
        log.seek(0)
        return log.read().decode(errors="replace"), code


def kept(log: str) -> str:
    """Keeps the output of a process in a temporary file, and returns a sentence that names it."""
    descriptor, file = tempfile.mkstemp(prefix="lockstep-plan-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as out:
        out.write(log)
    return f"All that was said: {file}"


def _context() -> Any:
    """Forking is safe on Linux only."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


class Traces:
    """Traces of one config on a number of devices, until a deadline of `time.monotonic`."""

    def __init__(self, config: Path, overrides: Sequence[str], world_size: int, deadline: float) -> None:
        for each in _LOADED:
            importlib.import_module(each)
        gc.freeze()  # a collection in a fork would copy these pages
        self._config, self._overrides, self._world_size, self._deadline = config, overrides, world_size, deadline

    def __call__(self, asked: Sequence[Sequence[str]]) -> list[Step | str]:
        """Returns the step for each of some overrides, or why there is none."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found: dict[int, Step | str] = {}
        waiting, running = list(range(len(asked))), dict[int, Any]()
        with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
            try:
                while (waiting or running) and (left := self._deadline - time.monotonic()) > 0:
                    while waiting and len(running) < min(cores, _AT_ONCE):
                        number = waiting.pop(0)
                        running[number] = self._start(asked[number], Path(folder) / str(number))
                    wait([each.sentinel for each in running.values()], left)
                    for number, process in list(running.items()):
                        if process.exitcode is not None:
                            found[number] = _read(Path(folder) / str(number), process.exitcode)
                            del running[number]
            finally:
                for process in running.values():
                    process.kill()
                    process.join()
        return [found.get(number, NO_TIME) for number in range(len(asked))]

    def _start(self, overrides: Sequence[str], out: Path) -> Any:
        seconds = math.ceil(self._deadline - time.monotonic()) + 1
        arguments = (seconds, str(self._config), str(self._world_size), str(out), *self._overrides, *overrides)
        process = _context().Process(target=_trace, args=arguments, daemon=True)
        process.start()
        return process


def _trace(seconds: int, config: str, world_size: str, out: str, *overrides: str) -> None:
    signal.alarm(seconds)  # the parent may be gone
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    main(config, world_size, out, *overrides)


def _read(out: Path, exit_code: int) -> Step | str:
    if exit_code == 0 and out.exists():
        found = json.loads(out.read_text(encoding="utf-8"))
        return str(found["error"]) if "error" in found else Step.parse(found)
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path(f"{out}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else f"the process that traced it ended with exit code {exit_code}"


def main(config: str, world_size: str, out: str, *overrides: str) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on machines with GPUs and without
    logging.disable(logging.WARNING)
    try:
        from lockstep.planner import gpu_rules
        from lockstep.planner.step import trace

        gpu_rules.install()
        found = trace(load(Path(config), overrides), int(world_size)).plain()
    except LockstepError as error:
        found = {"error": str(error), "exit_code": error.exit_code}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
