"""One run as a user would start it: the command, its log, its limit, and the losses it wrote or why it failed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lockstep.distributed.failure import describe_exit
from lockstep.doctor.ask import environment
from lockstep.record.run_folder import read_summary
from lockstep.verify.combinations import Combination

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


LOSS = "train/loss"  # what training rows call it
_EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*")


@dataclass(frozen=True)
class Trial:
    command: str
    log: Path
    folder: Path | None  # the run's own; None where it did not get as far as making one
    seconds: float
    losses: Mapping[int, float] = field(default_factory=dict)  # by step
    failure: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # at the end


def train(
    combination: Combination, config: Path, overrides: Sequence[str], out: Path, limit: float, pool: RunPool
) -> Trial:
    """Starts a new run of the config, in a folder below `out`."""
    out.mkdir(parents=True)
    settings = [f"--set={each}" for each in (*overrides, f"name={combination.name}")]
    return _run(combination, ["train", str(config), *settings, "--out", str(out / "runs")], out, limit, pool)


def resume(combination: Combination, run: Path, limit: float, pool: RunPool) -> Trial:
    return _run(combination, ["resume", str(run)], run.parents[1], limit, pool)


def _run(combination: Combination, arguments: list[str], out: Path, limit: float, pool: RunPool) -> Trial:
    command, log = [sys.executable, "-P", *combination.command, *arguments], out / "output.log"
    began = time.monotonic()
    if combination.plain:
        code = pool.command(arguments, log, limit)
    else:
        code = execute(command, {**environment(), **combination.env}, log, limit, pool.stopping)
    return _concluded(command, out, code, time.monotonic() - began, limit)


def _concluded(command: Sequence[str], out: Path, code: int | None, seconds: float, limit: float) -> Trial:
    """Returns the results of a run whose folder and log are below `out`."""
    log, folder = out / "output.log", next(iter((out / "runs").glob("*/")), None)
    summary = {} if folder is None else read_summary(folder)
    if code == 0:
        found = (summary.get("metrics") or {}).items()
        metrics = {name: each for name, each in found if isinstance(each, (int, float))}
        return Trial(shlex.join(command), log, folder, seconds, _losses(folder), metrics=metrics)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        said = [line.strip() for line in text.splitlines() if line.strip()]
        failure = f"did not end within {limit:g} s" + (f"; it last said: {said[-1]}" if said else "")
    else:
        failure = headline(text, summary.get("reason") or None, code)
    return Trial(shlex.join(command), log, folder, seconds, failure=failure)


def execute(
    command: Sequence[str], env: Mapping[str, str], log: Path, limit: float, stopping: threading.Event | None = None
) -> int | None:
    """Returns the exit code; None if it did not end in time, and was ended. `stopping` ends it as Ctrl-C does."""
    deadline = time.monotonic() + limit
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,  # so that what it starts can be ended with it
        )
        try:
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, _LOOK_SECONDS))
                if stopping is not None and stopping.is_set():
                    raise KeyboardInterrupt
            return None
        finally:
            end(process)


def _losses(folder: Path | None) -> dict[int, float]:
    from lockstep.record.writers import METRICS_FILE, SPEED, read_rows

    if folder is None or not (folder / METRICS_FILE).is_file():
        return {}
    rows = list(read_rows(folder / METRICS_FILE, having=SPEED))
    # A task with a custom training step may log other losses: the first of them.
    named = dict.fromkeys(name for row in rows for name in row if name.startswith("train/"))
    loss = LOSS if LOSS in named or not named else next(iter(named))
    return {row["step"]: row[loss] for row in rows if row.get(loss) is not None}


def headline(log: str, reason: str | None, code: int) -> str:
    """Returns one line of what a command printed before it failed: our launcher's line with that reason, which has the
    rank; else the last line of Lockstep; else, under another launcher, the first exception."""
    ours = [line.removeprefix("lockstep: ") for line in log.splitlines() if line.startswith("lockstep: ")]
    if reason is not None:
        first = reason.splitlines()[0]
        return next((line for line in ours if first in line), first)
    exceptions = (match[0] for line in log.splitlines() if (match := _EXCEPTION.match(line)))
    return ours[-1] if ours else next(exceptions, describe_exit(code))
