"""Parameter groups by pattern: which parameters an optimizer treats in a way of their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.config.optimizing import ParameterGroup
from lockstep.errors import ConfigError
from lockstep.train.matching import matching, parameters_of
from lockstep.train.models import MATCH

logger = logging.getLogger(__name__)

_REST = "the rest"


def parameter_groups(
    models: Mapping[str, nn.Module], groups: Sequence[ParameterGroup]
) -> dict[str, list[dict[str, Any]]]:
    """For every model, its trained parameters as groups for an optimizer: the rest first, then those of the config.

    Every parameter is in one of them, that of the first pattern that matches. A pattern may be about one model of
    several; one that is about none is refused.
    """
    named = parameters_of(models)
    chosen = _chosen(named, groups)
    found: dict[str, list[dict[str, Any]]] = {}
    for model_name, model in models.items():
        own = {id(each) for each in model.parameters()}
        mine = [[named[name] for name in names if id(named[name]) in own] for names in chosen]
        taken = {id(each) for part in mine for each in part}
        rest = [each for each in model.parameters() if each.requires_grad and id(each) not in taken]
        found[model_name] = [
            {"params": parameters, **arguments}
            for parameters, arguments in [
                (rest, {}),
                *((part, {MATCH: text(group), **group.arguments}) for part, group in zip(mine, groups, strict=True)),
            ]
            if parameters
        ]
    _tell(found)
    return found


def text(group: ParameterGroup) -> str:
    return ", ".join(group.match)


def _chosen(named: Mapping[str, nn.Parameter], groups: Sequence[ParameterGroup]) -> list[list[str]]:
    """The names of each group's parameters, of those that are trained."""
    free = [name for name, each in named.items() if each.requires_grad]
    chosen: list[list[str]] = []
    for number, group in enumerate(groups):
        setting = f"optimizer.groups[{number}].match"
        wanted = {name for pattern in group.match for name in matching(setting, pattern, named)}
        mine = [name for name in free if name in wanted]
        if not mine:
            raise ConfigError(
                f"{setting}: {text(group)}: what it matches ({', '.join(sorted(wanted)[:3])}) is frozen, or in a group "
                "before it, where the first that matches counts: take the group away, or put it first"
            )
        free = [name for name in free if name not in wanted]
        chosen.append(mine)
    return chosen


def _tell(found: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, groups in found.items():
        rows = [("parameters", "numbers", "group", "with")]
        rows += [
            (
                str(len(group["params"])),
                f"{sum(each.numel() for each in group['params']):,}",
                str(group.get(MATCH, _REST)),
                ", ".join(f"{key} {value}" for key, value in group.items() if key not in ("params", MATCH)) or "-",
            )
            for group in groups
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"  {row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        logger.info("parameter groups%s:\n%s", f" of {name}" if len(found) > 1 else "", "\n".join(lines))
