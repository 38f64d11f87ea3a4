"""What unit tests share: runs in a world of one, without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import RunSettings
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.record.display import Display
from lockstep.runtime.cpu import CpuRuntime
from lockstep.train.requests import Requests
from lockstep.train.run import Run

Runs = Callable[..., Run]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Runs]:
    """Makes runs in one folder, as if each were resumed after the other."""
    made: list[Run] = []

    def make(request: Requests | None = None, **settings: Any) -> Run:
        settings = {"checkpoint": {"async": False}, "log": {"every": "1 step"}, **settings}
        checked = RunSettings.model_validate(settings)
        stop = request or Requests()
        made.append(Run(Topology(), CpuRuntime(), Group(0, 1, 10.0), checked, tmp_path, Display(), stop))
        return made[-1]

    yield make
    for run in made:
        run.finish()
