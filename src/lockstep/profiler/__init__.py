"""Traces of a run: one interface, one backend per runtime. Nothing here imports torch before a profile is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import check_profile_ranks
from lockstep.profiler.base import Profiler

if TYPE_CHECKING:
    from lockstep.config.schema import Profile
    from lockstep.distributed.activity import Activity
    from lockstep.distributed.topology import Topology
    from lockstep.profiler.base import Backend

FOLDER = "profile"


def create(settings: Profile | None, runtime: str, topology: Topology, folder: Path, activity: Activity) -> Profiler:
    """What a rank profiles itself with: something that does nothing, where no profile of it is wanted."""
    check_profile_ranks(settings, topology.world_size)
    place = topology.place
    if settings is None or not settings.enabled or (settings.ranks is not None and place.rank not in settings.ranks):
        return Profiler()
    from lockstep.profiler.demand import Demand
    from lockstep.profiler.window import Window

    demand = Demand.listening(settings.address, settings.port, place.local_rank)
    return Window(_backend(runtime), settings, folder / FOLDER / f"proc_{place.rank}", activity, demand)


def _backend(runtime: str) -> Backend:
    if runtime == "xla":
        from lockstep.profiler.xla import XlaBackend

        return XlaBackend()
    from lockstep.profiler.torch import TorchBackend

    return TorchBackend(runtime)
