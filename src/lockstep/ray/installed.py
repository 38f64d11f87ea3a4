"""Whether there is a Ray that this package works with."""

from __future__ import annotations

import importlib.metadata
import os
import re

from lockstep.errors import ConfigError

OLDEST, NEWEST = (2, 50), (2, 60)
_TRAIN_V2 = "RAY_TRAIN_V2_ENABLED"


class RayMissing(ConfigError, ImportError):
    """Ray is not installed, or not one that this package works with."""


def require_ray() -> None:
    """Refuse to go on without Ray 2.50 to 2.60."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise RayMissing("lockstep.ray needs Ray, which is not installed: pip install 'lockstep-train[ray]'") from None
    problem = version_problem(version)
    if problem:
        raise RayMissing(problem)


def require_train_v2() -> None:
    """Ray as well, and the Ray Train that `launch: ray` is written for, before anything imports it.

    It is what Ray has been importing since 2.51; 2.50 has it too, and imports the older one unless it is asked.
    """
    require_ray()
    asked = os.environ.setdefault(_TRAIN_V2, "1")
    if asked.lower() not in ("1", "true"):
        raise ConfigError(f"{_TRAIN_V2}={asked}: `launch: ray` and sweeps need version 2 of Ray Train: unset it")


def version_problem(version: str) -> str | None:
    """What is wrong with a version of Ray; nothing where it is supported."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if release and OLDEST <= (int(release[1]), int(release[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (
        f"Ray {version} is installed; lockstep.ray works with Ray {oldest} to {newest}: "
        "pip install 'lockstep-train[ray]' brings one of these"
    )
