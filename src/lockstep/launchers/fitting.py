"""Whether a run fits the devices that are here: asked before it starts (`plan: check`), and told after it did not.

A plan is made by a process of its own, in a limited time. It never decides anything: a run starts also where it does
not fit by the plan, and one that failed ends with the exit code it has.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.distributed.failure import how_to_plan
from lockstep.distributed.signals import handled, unless_ignored

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Failure

Tell = Callable[[str], None]

_SECONDS = 120.0
_LAST_WORDS_SECONDS = 15.0
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ALLOWED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) allowed")  # torch.cuda.set_per_process_memory_fraction


def check(config: RunConfig, folder: Path, tell: Tell) -> None:
    """With `plan: check`: say whether a resolved config fits here, and what would make it fit."""
    if config.plan != "check":
        return
    if config.runtime == "xla":
        tell("plan: check: not checked: the memory of XLA's devices is not planned before a run")
        return
    tell(f"plan: check: tracing a step ({_SECONDS:g} s at most) ...")
    lines: list[str] = []
    code = _explained("check", config, folder, lines.append)
    if code == 0:
        tell(f"plan: {lines[0]}")
    elif code == 1:
        for line in [f"warning: plan: {lines[0]}", *lines[1:], "training starts all the same"]:
            tell(line)
    else:
        tell(f"warning: plan: check: not checked: {lines[-1] if lines else 'the plan was ended'}")


def not_checked(config: RunConfig, where: str, tell: Tell) -> None:
    """Where ranks are started by somebody else, or on other machines."""
    if config.plan == "check" and config.after is None:
        tell(f"plan: check: not checked {where}; ask before: lockstep plan CONFIG --on DEVICExN (docs/planning.md)")


def explain(failure: Failure, config: RunConfig, folder: Path, tell: Tell) -> None:
    """After a failure for lack of memory: what a step needs and of what, and what would make it fit."""
    if not failure.memory or config.after is not None:
        return
    if config.launch.type != "local" or config.runtime not in ("cpu", "cuda"):
        tell(how_to_plan(str(folder / "config.yaml"), int(config.processes)))
        return
    tell(f"out of memory: planning a step on this machine ({_SECONDS:g} s at most; Ctrl-C leaves) ...")
    lines: list[str] = []

    def say(line: str) -> None:
        tell(line)
        lines.append(line)

    code = _explained("failed", config, folder, say, _allowed(failure.cause))
    if code not in (0, 1):
        tell("no plan could be made" if lines else "no plan could be made in that time")


def _allowed(cause: str) -> int | None:
    found = _ALLOWED.search(cause)
    return int(float(found[1]) * _BYTES[found[2]]) if found else None


def _explained(why: str, config: RunConfig, folder: Path, tell: Tell, allowed: int | None = None) -> int | None:
    """The exit code of the process that plans, once every line of it is told."""
    command = [sys.executable, "-P", "-m", "lockstep.planner.explain", why, str(folder / "config.yaml")]
    command += ["--seconds", str(_SECONDS)]
    if config.runtime == "cpu" and (memory := _host_memory()) is not None:
        command += ["--host-memory", str(memory)]
    if allowed is not None:
        command += ["--allowed", str(allowed)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            tell(f"the process that plans could not be started: {error}")
            return None
        with process, _ended(process, before_a_run=why == "check"):
            assert process.stdout is not None
            for line in process.stdout:
                tell(line.rstrip())
        if process.returncode not in (0, 1, 2):
            errors.seek(0)
            if said := errors.read().strip().splitlines():
                tell(said[-1][:300])
        return process.returncode


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], before_a_run: bool) -> Iterator[None]:
    """End it, and all that it started, after its time or by a signal.

    Before a run, such a signal then does what it always did. After one, there is nothing else left to end.
    """
    received: list[int] = []

    def end() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def leave(number: int, frame: FrameType | None) -> None:
        received.append(number)
        end()

    limit = threading.Timer(_SECONDS + _LAST_WORDS_SECONDS, end)
    limit.daemon = True
    limit.start()
    try:
        with handled(dict.fromkeys(unless_ignored([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]), leave)):
            try:
                yield
            finally:
                end()
                process.wait()
    finally:
        limit.cancel()
    for number in received if before_a_run else ():
        os.kill(os.getpid(), number)


def _host_memory() -> int | None:
    """Bytes that the control group of this process leaves to all ranks together, where it does not leave them all."""
    from lockstep.launchers.local import limits

    return limits.memory_limit()
