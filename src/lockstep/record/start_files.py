"""What says how a run was started, on hosts that do not see its folder: it may be on the disk of rank 0's host alone.

Ranks have to know it before they meet, since it says how; so it goes over the store where they are about to.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from lockstep import run_files
from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError
from lockstep.record.run_folder import CONFIG_FILE

# The config of `lockstep train`, or how a script was started.
START_FILES = (CONFIG_FILE, "launch.yaml")
# How long ranks wait for it: it is what would tell them.
_WAIT_SECONDS = 120.0


def brought_here(folder: Path, topology: Topology) -> None:
    """Make sure that the run's folder on this host, made where it is missing, has the files that count: rank 0's."""
    from lockstep.distributed.rendezvous import from_rank_0

    place, here = topology.place, {}
    try:
        for name in START_FILES:
            with contextlib.suppress(FileNotFoundError):
                here[name] = run_files.read_text(folder / name)
        sent = from_rank_0(topology, _WAIT_SECONDS, "how the run was started", json.dumps(here).encode())
        if place.rank == 0:
            return
        told = json.loads(sent)
        for name in START_FILES:
            if name in told and told[name] != here.get(name):
                folder.mkdir(parents=True, exist_ok=True)
                run_files.write(folder / name, told[name])
    except OSError as error:
        raise ConfigError(
            f"rank {place.rank} on {place.host}: {folder}: the run's folder, for this rank's log, cannot be used on "
            f"this host: {error.strerror or error}. Make it writable for uid {os.getuid()}"
        ) from None
