"""Ranks on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launchers import checking

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.ray.controller import Ended


def train(config: RunConfig, make_folder: Callable[[RunConfig], Path], held: bool = False) -> Ended:
    """Train on the cluster that the config names, and wait for it. `held`: the caller holds the run's folder."""
    from lockstep.ray.installed import require_answer, require_train_v2

    require_train_v2()
    require_answer(config.launch.ray)
    checking.check(config)
    from lockstep.ray.controller import launch

    return launch(config, make_folder, held)


def is_elsewhere(config: RunConfig) -> bool:
    """Whether the ranks will be on other machines than this one, with what is installed there."""
    from lockstep.ray.installed import address_of

    return address_of(config.launch.ray) is not None


def described(config: RunConfig) -> str:
    """What would be asked of Ray."""
    from lockstep.ray.installed import require_train_v2

    require_train_v2()
    from lockstep.ray.controller import described

    return described(config)
