"""An own loop that was stopped: `lockstep resume` starts its script again, on its folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from conftest import Project, Started, rank_pids, steps_saved, summary, wait_until

SCRIPT = """
import json, os, pathlib, sys, time
import torch
import lockstep

def main(run):
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    restored = run.restore()
    began = run.progress.step
    for step in run.steps(2 * int(sys.argv[1])):
        run.backward(model(torch.randn(6, 4)).square().mean())
        run.step()
        if not restored:
            time.sleep(0.1)
    if run.is_main:
        found = {"restored": restored, "began": began, "world_size": run.world_size, "argv": sys.argv[1:]}
        pathlib.Path("found.json").write_text(json.dumps(found))

if __name__ == "__main__":
    lockstep.launch(main, processes=2, runtime="cpu")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]


@pytest.mark.parametrize("how", ["script", pytest.param("torchrun", marks=pytest.mark.long)])
def test_it_goes_on_where_it_was(project: Project, how: str) -> None:
    (project.folder / "own.py").write_text(SCRIPT)
    start = {"script": [], "torchrun": TORCHRUN}[how]
    command = project.start_python(*start, "own.py", "30", "two words", env={"API_KEY": "a secret"})
    run = Path(wait_until(lambda: list(project.folder.glob("runs/main-*/topology.json")), what="the run")[0]).parent
    shown = f"lockstep resume {run.relative_to(project.folder)}"
    file = run / "launch.yaml"
    assert "a secret" not in file.read_text() and "own.py" in file.read_text()
    wait_until(lambda: (project.folder / ".stderr").read_text().count(f"go on with: {shown}"), what="the folder's name")
    time.sleep(0.5)
    os.kill(command.process.pid if how == "script" else rank_pids(run)[1], signal.SIGTERM)
    stopped = command.wait()
    assert stopped.code == 75 if how == "script" else stopped.code != 0, stopped.text
    assert stopped.err.count(f"the run's folder is {run.relative_to(project.folder)}") == 1
    assert f"saved and stopped; go on with: {shown}" in stopped.err
    (saved,) = steps_saved(run)

    elsewhere = project.folder / "elsewhere"
    elsewhere.mkdir()
    again = Started([sys.executable, "-m", "lockstep", "resume", str(run)], elsewhere).wait()
    assert again.code == 0, again.text
    found = json.loads((project.folder / "found.json").read_text())
    world_size = 2 if how == "script" else 3
    assert found == {"restored": True, "began": saved, "world_size": world_size, "argv": ["30", "two words"]}
    assert (summary(run)["status"], summary(run)["step"]) == ("completed", 60)
    assert len(list((project.folder / "runs").iterdir())) == 1 and not (elsewhere / "runs").exists()

    before = sorted(each.name for each in (run / "checkpoints").iterdir())
    (project.folder / "own.py").write_text(SCRIPT.replace("run.restore()", "False"))
    forgotten = Started([sys.executable, "-m", "lockstep", "resume", str(run)], elsewhere).wait()
    assert forgotten.code != 0 and before, forgotten.text
    assert f"main has not called run.restore(): it would begin at step 0 and set {before[-1]} aside" in forgotten.err
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == before
