"""Which valid name somebody meant who wrote another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The most similar one, or one that the name abbreviates or is abbreviated by: `lr` and `learning_rate`."""
    names = list(valid)
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if found:
        return found[0]
    return next((each for each in names if name == _initials(each) or each == _initials(name)), None)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """For the end of a sentence: the nearest name, or all that there are."""
    names = list(valid)
    found = nearest(name, names)
    if found:
        return f"did you mean {found}?"
    return f"valid are {', '.join(names)}" if names else "there are none"


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""
