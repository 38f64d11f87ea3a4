"""What has another name now: it works for a while, and says what to write instead. docs/versions.md has the rule."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class DeprecatedWarning(FutureWarning):
    """Python shows this kind to everybody; a DeprecationWarning reaches hardly anyone who could change something."""


def warn(message: str, stacklevel: int = 2) -> None:
    warnings.warn(message, DeprecatedWarning, stacklevel=stacklevel + 1)


def renamed_argument(
    old: str, new: str, *, since: str, until: str
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """For a function whose argument `old` is called `new` since one version, and only that from another one on."""

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        name = function.__qualname__

        @functools.wraps(function)
        def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{name}: {old} and {new} are the same argument, give {new} alone")
                warn(f"{name}: {old} is called {new} since {since}, and only that from {until} on: write {new}=...")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return called

    return decorate
