"""Traces of a run: one interface, one backend per runtime. Nothing here imports torch before a profile is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import check_profile_ranks

if TYPE_CHECKING:
    from lockstep.config.schema import Profile
    from lockstep.distributed.activity import Activity
    from lockstep.distributed.topology import Topology


import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

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


_NOTHING = contextlib.nullcontext()


class Profiler:
    """No profile: a call that does nothing. What a run says to it several times in every step costs no more."""

    def next_step(self, step: int) -> None:
        """Between two steps: the one with this number is about to begin."""

    def enter(self, region: str | None) -> None:
        """From here on the step is in this region, or in none."""

    def region(self, name: str) -> AbstractContextManager[Any]:
        """A region with an end of its own, in the midst of whatever the step is in."""
        return _NOTHING

    def close(self) -> None:
        """The run is over: write what is unwritten."""

    def give_up(self) -> None:
        """The run failed: let go, and write nothing."""


class Backend(Protocol):
    """Takes traces, one at a time, with what the runtime has for it."""

    def start(self, folder: Path) -> None:
        """From here on everything is recorded."""

    def stop(self) -> Path:
        """Write what was recorded into the folder; the file, or the folder of files, that it went to."""

    def abandon(self) -> None:
        """Stop recording, and keep nothing."""

    def step(self, number: int) -> AbstractContextManager[Any]:
        """What a viewer takes for one step."""

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch of time."""


class _Profiled(Protocol):
    profiler: Profiler


Self = TypeVar("Self", bound=_Profiled)
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Method = Callable[Concatenate[Self, Arguments], Returned]


def in_region(name: str) -> Callable[[Method[Self, Arguments, Returned]], Method[Self, Arguments, Returned]]:
    """Makes a whole method one region of its object's profiler."""

    def decorate(method: Method[Self, Arguments, Returned]) -> Method[Self, Arguments, Returned]:
        @functools.wraps(method)
        def within(self: Self, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Returned:
            with self.profiler.region(name):
                return method(self, *arguments, **named)

        return within

    return decorate
