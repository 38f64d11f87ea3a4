"""Traces of a run: one interface, one backend per runtime. Nothing here imports torch before a profile is wanted."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.config.load import check_profile_ranks

if TYPE_CHECKING:
    from lockstep.config.schema import Profile
    from lockstep.distributed.activity import Activity
    from lockstep.distributed.topology import Topology

FOLDER = "profile"
_NOTHING = contextlib.nullcontext()


class Profiler:
    """Takes no profile. A run makes these calls several times in every step, at no cost."""

    def next_step(self, step: int) -> None:
        """The step with this number is about to begin."""

    def enter(self, region: str | None) -> None:
        """The step is in this region, or in none, from here on."""

    def region(self, name: str) -> AbstractContextManager[Any]:
        """Returns a region inside the one that the step is in."""
        return _NOTHING

    def close(self) -> None:
        """The run is over: writes what is unwritten."""

    def give_up(self) -> None:
        """The run failed: writes nothing."""


class Backend(Protocol):
    """Takes traces, one at a time, with the runtime's own profiler."""

    def start(self, folder: Path) -> None: ...

    def stop(self) -> Path:
        """Writes the trace into the folder; returns the file, or the folder of files."""

    def abandon(self) -> None:
        """Stops recording, and keeps nothing."""

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Returns what a viewer takes for one step."""

    def mark(self, name: str) -> AbstractContextManager[Any]: ...


def create(settings: Profile | None, runtime: str, topology: Topology, folder: Path, activity: Activity) -> Profiler:
    """Returns the profiler of a rank: one that does nothing if no profile of this rank is wanted."""
    check_profile_ranks(settings, topology.world_size)
    place = topology.place
    if settings is None or not settings.enabled or (settings.ranks is not None and place.rank not in settings.ranks):
        return Profiler()
    from lockstep.profiler.demand import Demand
    from lockstep.profiler.window import Window

    demand = Demand()
    if settings.port is not None:
        demand.serve(settings.address, settings.port + place.local_rank)
    backend: Backend
    if runtime == "xla":
        from lockstep.profiler.xla import XlaBackend

        backend = XlaBackend()
    else:
        from lockstep.profiler.window import TorchBackend

        backend = TorchBackend(runtime)
    return Window(backend, settings, folder / FOLDER / f"proc_{place.rank}", activity, demand)
