"""Patterns over the names of a model's parameters, matched as file names are."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping

from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategy.base import named_parameters


def matching(setting: str, pattern: str, names: Collection[str], others: Collection[str] = ()) -> list[str]:
    """The names that a pattern matches. One that matches none is refused, unless it matches one of the `others`."""
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found and not any(fnmatch.fnmatchcase(name, pattern) for name in others):
        listed = list(names)
        nearest = difflib.get_close_matches(pattern, listed, n=3, cutoff=0.3) or listed[:3]
        raise ConfigError(
            f"{setting}: {pattern}: no parameter has a name like that; the nearest are {', '.join(nearest)} "
            "(patterns are matched as file names are: * stands for anything)"
        )
    return found


def parameters_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter by its name, `generator.fc.weight` where there is more than one model."""
    return {name: each for name, each in named_parameters(models).items() if isinstance(each, nn.Parameter)}
