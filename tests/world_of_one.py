"""Runs in a world of one, without a launcher, for tests that need no process of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockstep.engine.run import Run
    from lockstep.engine.stop_requests import StopRequests


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs in one folder, as if each were resumed after the other."""

    from lockstep.config.schema import RunSettings
    from lockstep.distributed.group import Group
    from lockstep.distributed.topology import Topology
    from lockstep.engine.engine import Engine
    from lockstep.engine.run import Run
    from lockstep.engine.stop_requests import StopRequests
    from lockstep.record.display import Display
    from lockstep.runtime.cpu import CpuRuntime

    made: list[Run] = []

    def make(request: StopRequests | None = None, folder: str = "", **settings: Any) -> Run:
        for before in made:
            before._engine.checkpointer.give_up()  # its thread may still delete old checkpoints
        settings = {"checkpoint": {"async": False}, "log": {"every": "1 step"}, **settings}
        checked = RunSettings.model_validate(settings)
        stop = request or StopRequests()
        (tmp_path / folder).mkdir(exist_ok=True)
        parts = Topology(), CpuRuntime(), Group(0, 1, 10.0), checked, tmp_path / folder, Display(), stop
        made.append(Run(Engine(*parts)))
        return made[-1]

    yield make
    for run in made:
        run._engine.finish()
