"""torch_xla's profiler around steps on PJRT: what is written where, and that it changes nothing that is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Project

pytest.importorskip("torch_xla", reason="torch_xla is not installed (it has no build for 64-bit ARM)")

# A process of its own: SPMD and the device can be chosen once only.
PROGRAM = """
import sys
from pathlib import Path

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr

folder, spmd = Path(sys.argv[1]), sys.argv[2] == "spmd"
if spmd:
    xr.use_spmd()

from lockstep.config.schema import Profile
from lockstep.profiler.demand import Demand
from lockstep.profiler.window import Window
from lockstep.profiler.xla import XlaBackend
from lockstep.distributed.activity import Activity

profiler = Window(XlaBackend(), Profile(start_step=4, steps=3), folder, Activity(), Demand())
device = torch_xla.device()
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = []
for step in range(1, 9):
    profiler.next_step(step)
    profiler.enter("data")
    batch = torch.ones(4, 8).to(device)
    profiler.enter("forward")
    loss = model(batch).square().mean()
    profiler.enter("backward")
    loss.backward()
    profiler.enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()  # refused inside of a region that names the operations of the graph
    profiler.enter(None)
    compiled.append((metrics.metric_data("CompileTime") or (0,))[0])
profiler.close()
assert compiled[2] == compiled[-1], f"the profile made it compile again: {compiled}"
"""


@pytest.mark.requirement("P10")
@pytest.mark.parametrize("mode", ["single", "spmd"])
def test_a_window_on_pjrt(tmp_path: Path, mode: str) -> None:
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4" if mode == "spmd" else "1"}
    folder = tmp_path / "profile" / "proc_0"
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), mode],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    (trace,) = folder.glob("plugins/profile/*/*.xplane.pb")
    data = trace.read_bytes()
    for name in ("train", "step_num", "data", "forward", "backward", "optimizer"):
        assert name.encode() in data, name
    reader = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="the profile extra is not installed")
    shown, _ = reader.xspace_to_tool_data([str(trace)], "trace_viewer", {})
    assert b'"forward"' in (shown if isinstance(shown, bytes) else shown.encode())


@pytest.mark.requirement("P10")
def test_a_run_on_xla_writes_what_tensorboard_reads(project: Project) -> None:
    """The whole of it: a task, trained with a profile, with all regions of a step that ends an epoch."""
    run = project.train(
        "--profile", "--set", "profile.start_step=6", "--set", "profile.port=null", runtime="xla", processes=1
    )
    (trace,) = (run / "profile" / "proc_0").glob("plugins/profile/*/*.xplane.pb")
    data = trace.read_bytes()
    for name in ("data", "forward", "backward", "optimizer", "validate", "checkpoint"):
        assert name.encode() in data, name
