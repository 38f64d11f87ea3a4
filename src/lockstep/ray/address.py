"""Where the cluster is, and whether anybody answers there; asked before Ray is loaded, which takes seconds."""

from __future__ import annotations

import os
import socket

from lockstep.config.schema import RayCluster
from lockstep.errors import LaunchError

# How long a cluster may take to answer at its address.
CONNECT_SECONDS = 15.0


def address_of(settings: RayCluster) -> str | None:
    """Where the cluster is; None where one has to be started. A job that Ray runs finds its cluster in RAY_ADDRESS."""
    return settings.address or os.environ.get("RAY_ADDRESS") or None


def require_answer(settings: RayCluster) -> None:
    """Ray itself takes minutes to find out that nobody is there."""
    address = address_of(settings) or ""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`: Ray knows at once
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise LaunchError(
            f"launch.ray.address: nobody answers at {address} within {CONNECT_SECONDS:g} s ({error}). Check that the "
            "head node is up, the address, the port and the firewall; leave it out to train on this machine"
        ) from None
