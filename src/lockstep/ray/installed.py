"""Checks before Ray is imported, which takes seconds: its version, and whether a cluster answers at the address."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket

from lockstep.config.schema import RayCluster
from lockstep.errors import ConfigError, LaunchError

OLDEST, NEWEST = (2, 52), (2, 60)
_CONNECT_SECONDS = 15.0


class RayMissing(ConfigError, ImportError):
    """Ray is not installed, or its version is not supported."""


def require_ray() -> None:
    """Raises RayMissing without Ray 2.52 to 2.60."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise RayMissing("lockstep.ray needs Ray, which is not installed: pip install 'lockstep-train[ray]'") from None
    problem = version_problem(version)
    if problem:
        raise RayMissing(problem)


def version_problem(version: str) -> str | None:
    release = re.match(r"(\d+)\.(\d+)", version)
    if release and OLDEST <= (int(release[1]), int(release[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (
        f"Ray {version} is installed; lockstep.ray works with Ray {oldest} to {newest}: "
        "pip install 'lockstep-train[ray]' brings one of these"
    )


def address_of(settings: RayCluster) -> str | None:
    """Returns the cluster's address, or None if one is to be started. Ray sets RAY_ADDRESS for a job that it runs."""
    return settings.address or os.environ.get("RAY_ADDRESS") or None


def require_answer(settings: RayCluster) -> None:
    """Raises LaunchError if nothing listens at the address: Ray itself takes minutes to find out."""
    address = address_of(settings) or ""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`: Ray knows at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise LaunchError(
            f"launch.ray.address: nobody answers at {address} within {_CONNECT_SECONDS:g} s ({error}). Check that the "
            "head node is up, the address, the port and the firewall; leave it out to train on this machine"
        ) from None
