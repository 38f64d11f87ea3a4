"""Runs commands side by side, as many as there are cores for, in processes that have loaded torch already."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from lockstep.doctor.ask import environment

Found = TypeVar("Found")

_MOST = 4
_LOOK_SECONDS = 0.2
# Once asked to stop, a run has `timeouts.stop` to leave, and this is longer.
_LEAVE_SECONDS = 20.0


class RunPool:
    """Where runs are executed. Those under way end when the block does, also by Ctrl-C."""

    def __init__(self, work: Path, runs: int) -> None:
        """`runs` is the most that there will be."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = max(min(cores, _MOST, runs), 1)
        self.stopping = threading.Event()
        # Libraries read it when they are loaded, which is once for runs of one and of four processes.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores // 4, 1)))}
        self._all = [_Starter(work / f".starter-{number}.log", threads, self.stopping) for number in range(self.count)]
        self._free = queue.SimpleQueue[_Starter]()
        for each in self._all:
            self._free.put(each)

    @contextlib.contextmanager
    def open(self) -> Iterator[RunPool]:
        try:
            for each in self._all:
                each.begin()  # all of them load torch meanwhile
            yield self
        finally:
            self.stopping.set()
            for each in self._all:
                each.end()

    def side_by_side(self, tasks: Sequence[Callable[[], Found]]) -> list[Found]:
        """Returns all results in order; raises the first failure once all that were begun have ended."""
        failed = threading.Event()

        def guarded(task: Callable[[], Found]) -> Found:
            if failed.is_set() or self.stopping.is_set():
                raise CancelledError
            try:
                return task()
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.count, "lockstep-verify") as pool:
            futures = [pool.submit(guarded, task) for task in tasks]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C
                self.stopping.set()
                raise
        return [future.result() for future in futures]

    def command(self, arguments: Sequence[str], log: Path, limit: float) -> int | None:
        """Runs a lockstep command and returns its exit code; None if it did not end in time."""
        starter = self._free.get()
        try:
            return starter.run(arguments, log, limit)
        finally:
            self._free.put(starter)


class _Starter:
    """A process that runs one command after the other; it is replaced after a failure."""

    def __init__(self, log: Path, variables: Mapping[str, str], stopping: threading.Event) -> None:
        self._log, self._variables, self._stopping = log, variables, stopping
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.cli.starter"], env={**environment(), **self._variables},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, process_group=0,
            )  # fmt: skip
        return self._process

    def run(self, arguments: Sequence[str], log: Path, limit: float) -> int | None:
        process = self._process or self.begin()
        before = self._log.stat().st_size
        code: int | None = None
        try:
            code = self._answer(process, arguments, limit)
        finally:
            if code != 0:
                self.end()
        with self._log.open("rb") as written:
            written.seek(before)
            log.write_bytes(written.read())
        return code

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _answer(self, process: subprocess.Popen[bytes], arguments: Sequence[str], limit: float) -> int | None:
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + limit
        try:
            process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it is gone
            return process.wait(limit) or 1
        while not select.select([process.stdout], [], [], _LOOK_SECONDS)[0]:
            if self._stopping.is_set():
                raise KeyboardInterrupt
            if time.monotonic() >= deadline:
                return None
        line = process.stdout.readline()
        return int(line) if line.strip() else process.wait(limit) or 1


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks first, so that a launcher ends its ranks, wherever they are. Does nothing if the process has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_SECONDS)
