"""The config of a run whose folder is on the disk of rank 0's host alone, on the other hosts.

Ranks have to know it before they meet, since it says how; so it goes over the store where they are about to.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError
from lockstep.record.run_folder import CONFIG_FILE

# How long ranks wait for it: it is what would tell them.
_WAIT_SECONDS = 120.0


def brought_here(folder: Path, topology: Topology) -> None:
    """Make sure that the run's folder on this host, made where it is missing, has the config that counts."""
    from lockstep.distributed.rendezvous import from_rank_0

    place, file = topology.place, folder / CONFIG_FILE
    try:
        here = file.read_bytes() if file.is_file() else b""
        told = from_rank_0(topology, _WAIT_SECONDS, "the run's config", here)
        if place.rank == 0 or told in (here, b""):
            return  # where rank 0 has none either, everybody says so
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}-{place.rank}.partial")
        temporary.write_bytes(told)
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(
            f"rank {place.rank} on {place.host}: {folder}: the run's folder, for this rank's log, cannot be made "
            f"on this host: {error.strerror or error}. Make it writable for uid {os.getuid()}"
        ) from None
