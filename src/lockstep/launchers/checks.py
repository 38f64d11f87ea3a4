"""Checks a run before it starts: the names in its config, and whether a step fits into the memory of this machine.

Names of optimizers, parameters, metrics and data are known once the task is imported. For ranks on other machines, a
subprocess imports it here (`python -m lockstep.launchers.checks`), so that torch does not stay in this process. Memory
is planned by a subprocess with a time limit, and only advises: a run starts even if it does not fit by the plan.
"""

from __future__ import annotations

import contextlib
import json
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
from lockstep.errors import ConfigError
from lockstep.terminal import tell
from lockstep.version import version_of

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Failure

Say = Callable[[str], None]

_NAMES_SECONDS = 30.0
_PLAN_SECONDS, _PLAN_END_SECONDS = 120.0, 15.0
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ALLOWED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) allowed")  # torch.cuda.set_per_process_memory_fraction


class NamesCheck:
    """Checks the names of a config in a subprocess; `finish` waits for it."""

    def __init__(self, config: RunConfig) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._not_checked = ""
        if config.task.type.startswith("__main__"):
            self._not_checked = f"{config.task.type} was typed into this session"
        elif version_of("torch") is None:
            self._not_checked = "torch is not installed here"
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.launchers.checks"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._question = json.dumps(config.plain())

    def finish(self) -> None:
        """Raises ConfigError for a mistake, and says what could not be checked."""
        if self._process is not None:
            try:
                answer = json.loads(self._process.communicate(self._question, _NAMES_SECONDS)[0])
            except subprocess.TimeoutExpired:
                answer = {"not_checked": f"importing the task took longer than {_NAMES_SECONDS:g} s"}
            except ValueError:
                answer = {"not_checked": f"the process that checks ended with exit code {self._process.returncode}"}
            finally:
                self.end()
            if answer.get("problem"):
                raise ConfigError(answer["problem"])
            self._not_checked = answer.get("not_checked", "")
        if self._not_checked:
            tell(f"lockstep: names in the config are not all checked before the start: {self._not_checked}")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(OSError, ValueError):
                self._process.communicate()


def check_names(config: RunConfig) -> None:
    NamesCheck(config).finish()


def check_imports(config: RunConfig, elsewhere: bool = False) -> None:
    """Checks names by importing the task into this process; `elsewhere`: some parts may be installed there alone."""
    from lockstep.tasks.config_checks import ELSEWHERE, check_made, check_parts

    check_parts(config, ELSEWHERE if elsewhere else ())
    if not elsewhere:
        check_made(config)


def silence() -> None:
    """Hides what user code prints while it is checked, since the ranks import the same."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def check_memory(config: RunConfig, folder: Path, say: Say) -> None:
    """With `plan: check`, says whether a resolved config fits here, and what would make it fit."""
    if config.plan != "check" or config.after is not None:
        return
    if config.runtime == "xla":
        say("plan: check: not checked: the memory of XLA's devices is not planned before a run")
        return
    say(f"plan: check: tracing a step ({_PLAN_SECONDS:g} s at most) ...")
    lines: list[str] = []
    code = _plan_memory("check", config, folder, lines.append)
    if code == 0:
        say(f"plan: {lines[0]}")
    elif code == 1:
        for line in [f"warning: plan: {lines[0]}", *lines[1:], "training starts all the same"]:
            say(line)
    else:
        say(f"warning: plan: check: not checked: {lines[-1] if lines else 'the plan was ended'}")


def memory_not_checked(config: RunConfig, where: str, say: Say) -> None:
    if config.plan == "check" and config.after is None:
        say(f"plan: check: not checked {where}; ask before: lockstep plan CONFIG --on DEVICExN (docs/planning.md)")


def explain_out_of_memory(failure: Failure, config: RunConfig, folder: Path, say: Say) -> None:
    """After a failure for lack of memory, says what a step needs it for, and what would make it fit."""
    if not failure.memory or config.after is not None:
        return
    if config.launch.type != "local" or config.runtime not in ("cpu", "cuda"):
        say(how_to_plan(str(folder / "config.yaml"), int(config.processes)))
        return
    say(f"out of memory: planning a step on this machine ({_PLAN_SECONDS:g} s at most; Ctrl-C leaves) ...")
    lines: list[str] = []

    def say_and_keep(line: str) -> None:
        say(line)
        lines.append(line)

    code = _plan_memory("failed", config, folder, say_and_keep, allowed_bytes(failure.cause))
    if code not in (0, 1):
        say("no plan could be made" if lines else "no plan could be made in that time")


def allowed_bytes(cause: str) -> int | None:
    found = _ALLOWED.search(cause)
    return int(float(found[1]) * _BYTES[found[2]]) if found else None


def _plan_memory(why: str, config: RunConfig, folder: Path, say: Say, allowed: int | None = None) -> int | None:
    """Runs the planner, passes its lines on, and returns its exit code."""
    from lockstep.launchers.local import limits

    command = [sys.executable, "-P", "-m", "lockstep.planner.explain", why, str(folder / "config.yaml")]
    command += ["--seconds", str(_PLAN_SECONDS)]
    if config.runtime == "cpu" and (memory := limits.memory_limit()) is not None:
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
            say(f"the process that plans could not be started: {error}")
            return None
        with process, _killed_in_time(process, before_a_run=why == "check"):
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip())
        if process.returncode not in (0, 1, 2):
            errors.seek(0)
            if said := errors.read().strip().splitlines():
                say(said[-1][:300])
        return process.returncode


@contextlib.contextmanager
def _killed_in_time(process: subprocess.Popen[str], before_a_run: bool) -> Iterator[None]:
    """Kills the process group at the end, after the time limit, or on a signal.

    Before a run, this process then receives the signal again; after one, there is nothing left to stop.
    """
    received: list[int] = []

    def end() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def leave(number: int, frame: FrameType | None) -> None:
        received.append(number)
        end()

    limit = threading.Timer(_PLAN_SECONDS + _PLAN_END_SECONDS, end)
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


def main() -> None:
    """Answers NamesCheck: reads a config from standard input and writes what is wrong with it, as JSON."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence()
    from lockstep.config.load import from_plain
    from lockstep.tasks.config_checks import ELSEWHERE, check_made, check_parts

    config = from_plain(json.load(sys.stdin), "standard input")
    answer = {}
    try:
        if passed_over := check_parts(config, ELSEWHERE):
            answer["not_checked"] = passed_over[0]
        check_made(config)
    except ConfigError as error:
        answer["problem"] = str(error)
    json.dump(answer, answers)
    answers.close()
    os._exit(0)  # without waiting for threads of the user's modules


if __name__ == "__main__":
    main()
