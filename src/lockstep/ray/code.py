"""The task's code on its way to the workers: its folder travels, without what does not belong there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.objects import EXCLUDED
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError


def runtime_env(config: RunConfig) -> tuple[dict[str, Any], str]:
    """Ray's runtime_env for a run on somebody else's machines, and how the task is called there.

    A folder that the user named as working_dir travels instead of the task's own.
    """
    given = dict(config.launch.ray.runtime_env)
    module, _, name = config.task.type.rpartition(":") if ":" in config.task.type else config.task.type.rpartition(".")
    if not module.endswith(".py"):
        return given, config.task.type  # a module that is installed, or comes by the user's own py_modules
    file = Path(module)
    if "working_dir" in given:
        folder = Path(str(given["working_dir"])).expanduser().resolve()
        if not file.is_relative_to(folder):
            raise ConfigError(
                f"launch.ray.runtime_env.working_dir: the task's file {file} is not in {folder}, so it would not "
                "travel to the workers; leave working_dir out and the task's folder travels"
            )
        return given, f"{file.relative_to(folder)}:{name}"
    excludes = [*EXCLUDED, *given.pop("excludes", [])]
    return {**given, "working_dir": str(file.parent), "excludes": excludes}, f"{file.name}:{name}"


def described(env: Mapping[str, Any]) -> str:
    """What travels, in a line; never the values of variables, which may be secrets."""
    parts = [f"{name} {value}" for name, value in env.items() if name in ("working_dir", "pip", "uv", "conda")]
    if "env_vars" in env:
        parts.append(f"variables {', '.join(sorted(env['env_vars']))}")
    return "; ".join(parts)
