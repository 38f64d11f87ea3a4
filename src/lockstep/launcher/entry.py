"""Where a process from the fork server begins: named by the launcher, which imports no torch for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """An orderly end: the exit code that a process would have had by itself, and what its function returned."""

    exit_code: int = 0
    value: Any = None


def run_rank(*arguments: Any) -> None:
    from lockstep.launcher import child

    try:
        child.run_rank(*arguments)
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception:  # it has written down what it was; multiprocessing would print it
        sys.exit(1)


def run_command(argv: tuple[str, ...]) -> None:
    from lockstep.launcher import child

    child.run_command(argv)


def check_config(connection: Any, config: Any) -> None:
    from lockstep.launcher import child

    child.check_config(connection, config)


def call_function(pickled: bytes) -> Any:
    from lockstep.launcher import child

    return child.call_function(pickled)
