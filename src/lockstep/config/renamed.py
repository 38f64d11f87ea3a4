"""Keys of the config that have another name now. docs/versions.md says how long the old ones are understood."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.task_file import KeyPath
from lockstep.deprecated import warn
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Renamed:
    """Both are dotted names; a test sees to it that the line goes when the version `until` comes."""

    old: str
    new: str
    since: str
    until: str


RENAMED: tuple[Renamed, ...] = ()


def with_current_names(
    raw: Mapping[str, Any], places: Mapping[KeyPath, str], source: str, renamed: Sequence[Renamed] = RENAMED
) -> tuple[Mapping[str, Any], Mapping[KeyPath, str]]:
    """The same with every value under the name that its key has now, and a warning for each that had to be moved."""
    for each in renamed:
        old, new = tuple(each.old.split(".")), tuple(each.new.split("."))
        if not _has(raw, old):
            continue
        place = places.get(old, source)
        if _has(raw, new):
            raise ConfigError(
                f"{place}: {each.old}: is called {each.new} now, which is given as well: leave {each.old} out"
            )
        warn(
            f"{place}: {each.old}: is called {each.new} since {each.since}, and only that from {each.until} on: "
            f"write {each.new}",
            stacklevel=4,
        )
        raw = _moved(raw, old, new)
        below = {(*new, *key[len(old) :]): at for key, at in places.items() if key[: len(old)] == old}
        places = {**{key: at for key, at in places.items() if key[: len(old)] != old}, **below}
    return raw, places


def _has(raw: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True


def _moved(raw: Mapping[str, Any], old: Sequence[str], new: Sequence[str]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(raw))
    source: Any = changed
    for key in old[:-1]:
        source = source[key]
    value = source.pop(old[-1])
    target: Any = changed
    for depth, key in enumerate(new[:-1]):
        if not isinstance(target.get(key), dict):
            if target.get(key) is not None:
                raise ConfigError(
                    f"{'.'.join(old)}: is called {'.'.join(new)} now, but {'.'.join(new[: depth + 1])} is "
                    f"{target[key]!r}, which has no keys below"
                )
            target[key] = {}
        target = target[key]
    target[new[-1]] = value
    return changed
