"""Every process writes a trace of its own, with the regions of its own steps."""

from __future__ import annotations

from pathlib import Path

import bodies
import pytest

import lockstep
from traces import REGIONS, named, slices, torch_traces


@pytest.mark.requirement("P10")
def test_two_processes_write_a_trace_each(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    profile = {"start_step": 4, "steps": 3, "port": None}
    launched = lockstep.launch(bodies.profiled_loop, processes=2, runtime="cpu", folder=folder, profile=profile)
    assert launched == [10, 10]
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["proc_0", "proc_1"]
    found = {rank: torch_traces(folder, rank) for rank in (0, 1)}
    for (trace,) in found.values():
        names = named(trace)
        assert {*REGIONS, "my model", "ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"} <= {*names}
        assert names["my model"] == names["forward"] == names["backward"] == names["optimizer"] == 3
    processes = {event["pid"] for (trace,) in found.values() for event in slices(trace) if event["name"] == "forward"}
    assert len(processes) == 2
