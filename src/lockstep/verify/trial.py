"""One run as a user would start it: the command, its log, its limit, and the losses it wrote or why it failed."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.distributed.failure import describe_exit
from lockstep.doctor.ask import environment
from lockstep.record.run_folder import read_summary
from lockstep.verify.combinations import Combination
from lockstep.verify.pool import RunPool, end

LOSS = "train/loss"  # what training rows call it
_LOOK_SECONDS = 0.5
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
    from lockstep.record.metric_writer import METRICS_FILE
    from lockstep.record.writers import SPEED, read_rows

    if folder is None or not (folder / METRICS_FILE).is_file():
        return {}
    rows = [row for row in read_rows(folder / METRICS_FILE) if SPEED in row]
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
