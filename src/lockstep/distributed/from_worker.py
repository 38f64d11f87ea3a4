"""Carries an error from a data worker to its rank: the same error, with the worker's traceback once, as its cause."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from lockstep.distributed.failure import InWorker, user_traceback


@dataclass(frozen=True)
class FromWorker:
    pickled: bytes  # its class, arguments and attributes
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> FromWorker:
        reduced: Any = _builtin(type(error)).__reduce__(error)
        try:
            pickled = pickle.dumps(reduced)
            cls(pickled, "").error()
        except Exception:  # its class is defined in a function, or it holds what cannot be pickled
            notes = {"__notes__": getattr(error, "__notes__", [])}
            pickled = pickle.dumps((RuntimeError, (f"{type(error).__name__}: {error}",), notes))
        return cls(pickled, "".join(user_traceback(error)))

    def error(self) -> Exception:
        """Makes the error anew, without the constructor of its class, which may take other arguments."""
        kind, arguments, *state = pickle.loads(self.pickled)
        made: Exception = kind.__new__(kind, *arguments)
        _builtin(kind).__init__(made, *arguments)
        if state:
            BaseException.__setstate__(made, state[0])
        made.__cause__ = InWorker(self.traceback)
        return made


def _builtin(kind: type[Exception]) -> type[Exception]:
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")
