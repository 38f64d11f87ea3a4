"""A run on the hosts of a config: started by the commands that one would give, and its folder brought here.

The pod gets a name of its own, and is removed from the hosts in the end, whatever became of the run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.doctor.ask import environment
from lockstep.verify.combinations import Combination
from lockstep.verify.trial import Trial, command_of, concluded, execute, settings_of

# How long a pod's own commands may take, and how often a run that does not end is told to before its pod is removed.
_COMMAND_SECONDS, _TRIES = 120.0, 5


def train(combination: Combination, config: Path, overrides: Sequence[str], out: Path, limit: float) -> Trial:
    """A new run of the config on its hosts; its folder is below `out` afterwards."""
    out.mkdir(parents=True)
    pod, settings = f"verify-{secrets.token_hex(4)}", settings_of(combination, overrides)

    def run(log: str, *arguments: str, seconds: float = _COMMAND_SECONDS) -> int | None:
        return execute(command_of(combination, arguments), environment(), out / log, seconds)

    made = ["pod", "create", pod, "--config", str(config), *settings]
    began = time.monotonic()
    code = run("output.log", *made)
    if code != 0:  # not all hosts can take part; nothing is remembered, and nothing is on them yet
        return concluded(command_of(combination, made), out, code, time.monotonic() - began, _COMMAND_SECONDS)
    command = ["train", str(config), *settings, "--pod", pod]
    try:
        code = run("output.log", *command, seconds=limit)
        seconds = time.monotonic() - began
        pulled = run("pull.log", "pod", "pull", pod, "--out", str(out / "runs"))
    finally:
        _remove(pod, run)
    found = concluded(command_of(combination, command), out, code, seconds, limit)
    if pulled != 0 and not found.failure:
        return replace(found, failure=f"the run's folder could not be brought here; see {out / 'pull.log'}")
    return found


def _remove(pod: str, run: Callable[..., int | None]) -> None:
    """A job that is still at work is ended first: asked twice, as by Ctrl-C."""
    for _ in range(_TRIES):
        if run("delete.log", "pod", "delete", pod, "--yes") == 0:
            return
        run("stop.log", "pod", "stop", pod, "--now")
        time.sleep(1.0)
