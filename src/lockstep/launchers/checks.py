"""Checks the names in a config before a run starts.

Names of optimizers, parameters, metrics and data are known once the task is imported. For ranks on other machines, a
subprocess imports it here (`python -m lockstep.launchers.checks`), so that torch does not stay in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.terminal import tell
from lockstep.version import version_of

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

_NAMES_SECONDS = 30.0


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
