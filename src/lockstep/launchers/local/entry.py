"""Where a process from the fork server begins: named by the launcher, which imports no torch for it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NOTHING = pickle.dumps(None)


@dataclass(frozen=True)
class Outcome:
    """An orderly end: the exit code that a process would have had by itself, and what its function returned."""

    exit_code: int = 0
    value: bytes = _NOTHING  # pickled
    kind: str = "NoneType"
    error: str = ""  # why the value could not be pickled

    @classmethod
    def of(cls, value: Any) -> Outcome:
        """Pickles a return value. The work is done by now, so a value that cannot be pickled is no failure."""
        kind = type(value).__qualname__
        if type(value).__module__ != "builtins":
            kind = f"{type(value).__module__}.{kind}"
        try:
            return cls(value=pickle.dumps(value), kind=kind)
        except Exception as error:
            return cls(kind=kind, error=_first_line(error))

    def received(self, rank: int, warn: Callable[[str], None]) -> Any:
        """Returns the value, or None with a warning where it cannot be pickled or unpickled."""
        problem = self.error
        try:
            if not problem:
                return pickle.loads(self.value)
        except Exception as error:
            problem = _first_line(error)
        warn(
            f"rank {rank} returned a {self.kind}, which cannot be sent to the launcher ({problem}). The run is "
            "complete, and None is returned for this rank. Return plain data or tensors, or save the object in "
            "run.folder"
        )
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def run_rank(*arguments: Any) -> None:
    from lockstep.launchers.local import child

    try:
        child.run_rank(*arguments)
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception:  # it has written down what it was; multiprocessing would print it
        sys.exit(1)


def run_command(argv: tuple[str, ...]) -> None:
    from lockstep.launchers.local import child

    child.run_command(argv)


def check_config(connection: Any, config: Any) -> None:
    from lockstep.launchers.local import child

    child.check_config(connection, config)


def call_function(pickled: bytes) -> Any:
    from lockstep.launchers.local import child

    return child.call_function(pickled)
