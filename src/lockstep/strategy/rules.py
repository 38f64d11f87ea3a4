"""Sharding rules that come from code, held to what the config would be held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lockstep.config.strategy import ShardRule
from lockstep.errors import ConfigError


def shard_rules(rules: Mapping[str, Any]) -> dict[str, ShardRule]:
    """Parameter-name pattern -> rule, from axis names per dimension or from a mapping with a spec and a mesh."""
    checked = {}
    for pattern, rule in rules.items():
        try:
            checked[pattern] = ShardRule.model_validate({"spec": rule} if isinstance(rule, list | tuple) else rule)
        except ValidationError as problems:
            raise ConfigError(
                f"shard_rules: {pattern!r}: {problems.errors()[0]['msg']}, got {rule!r}: give an axis name (or None) "
                "for every dimension of the parameter"
            ) from None
    return checked
