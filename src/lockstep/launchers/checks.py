"""Checks the names in a config before a run starts.

Names of optimizers, parameters, metrics and data are known once the task is imported, by a child of the fork server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.terminal import tell
from lockstep.version import version_of

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig


def prepare() -> None:
    """Starts to import torch in the background, for check_names."""
    from lockstep.launchers.local import fork_server

    if version_of("torch") is not None:
        fork_server.warm_up(1)


def check_names(config: RunConfig) -> None:
    """Raises ConfigError for a mistake before ranks start on other machines, and says what could not be checked."""
    from lockstep.launchers.local import fork_server

    if config.task.type.startswith("__main__"):
        not_checked = f"{config.task.type} was typed into this session"
    elif version_of("torch") is None:
        not_checked = "torch is not installed here"
    else:
        prepare()
        not_checked = fork_server.check(config, elsewhere=True)
        fork_server.stop()
    if not_checked:
        tell(f"lockstep: names in the config are not all checked before the start: {not_checked}")


def check_imports(config: RunConfig, elsewhere: bool = False) -> None:
    """Checks names by importing the task into this process; `elsewhere`: some parts may be installed there alone."""
    from lockstep.tasks.config_checks import ELSEWHERE, check_made, check_parts

    check_parts(config, ELSEWHERE if elsewhere else ())
    if not elsewhere:
        check_made(config)
