"""`lockstep resume --step | --best`: from an older checkpoint, bit for bit, under every way of starting ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import TASK_FILE, Project, Started, losses, steps_saved, summary
from lockstep.cli import main

EVERY = {"checkpoint": {"every": "7 steps", "keep": {"last": 9}}, "train": {"epochs": 4, "batch_size": 12}}


def aside(run: Path) -> list[str]:
    there = [path.name for path in (run / "checkpoints").glob("[!.]*") if not path.is_symlink()]
    return sorted(name for name in there if not name.startswith(("step-", ".")))


@pytest.mark.parametrize("under", ["ours", pytest.param("torchrun", marks=pytest.mark.long)])
def test_an_older_step_is_gone_on_from_and_what_is_newer_is_set_aside(project: Project, under: str) -> None:
    """Also where torchrun starts the command once more, after a rank has failed in a step of the new branch."""
    once = project.folder / "once"
    once.touch()
    fail = {"rank": 1, "step": 9, "how": "exception", "once": str(once)}
    run = project.train(**EVERY, task={"type": f"{TASK_FILE}:Tiny", "fail_at": fail})
    first = losses(run)
    if under == "torchrun":
        once.unlink()
    assert steps_saved(run) == [7, 14, 21, 28]
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    torchrun = ["-m", "torch.distributed.run", *options] if under == "torchrun" else []
    command = [sys.executable, *torchrun, "-m", "lockstep", "resume", str(run), "--step", "14"]
    finished = Started(command, project.folder).wait()
    assert finished.code == 0, finished.text
    assert "lockstep: going on from step 14" in finished.err and finished.err.count("aside-step-00000021") == 1
    assert aside(run) == ["aside-step-00000021", "aside-step-00000028"]
    assert (steps_saved(run), summary(run)["step"]) == ([7, 14, 21, 28], 28)
    assert losses(run) == first, "the same steps once more, and each of them has one row"
    restored = re.findall(r"restored step-0*(\d+)", (run / "logs" / "rank-1.log").read_text())
    assert restored == (["14"] if under == "ours" else ["14", "21"])


def test_a_restart_goes_on_with_the_new_branch_and_what_cannot_be_chosen_is_refused(project: Project) -> None:
    once = project.folder / "once"
    once.touch()
    fail = {"rank": 1, "step": 9, "how": "kill", "once": str(once)}
    run = project.train(**EVERY, task={"type": f"{TASK_FILE}:Tiny", "fail_at": fail})
    first = losses(run)
    _damage(run / "checkpoints" / "step-00000021" / "model.safetensors")

    before = sorted(run.rglob("*"))
    for options, why in [
        (["--step", "8"], "there is no checkpoint of step 8 (steps with one: 7, 14, 21, 28)"),
        (["--step", "21"], "lockstep: --step 21: "),
        (["--step", "14", "--best"], "lockstep: --step 14 and --best: name one of them"),
        (["--step", "-1"], "Invalid value for '--step'"),
    ]:
        refused = CliRunner().invoke(main, ["resume", str(run), *options])
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.output
    best = summary(run)["best"]["step"]
    dry = CliRunner().invoke(main, ["resume", str(run), "--best", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    newer = ", ".join(f"step-{step:08d}" for step in (7, 14, 21, 28) if step > best) or "none"
    assert dry.stdout.splitlines()[-1] == f"from step {best}; to be set aside: {newer}"
    assert sorted(run.rglob("*")) == before, "nothing of this has changed anything"

    # Back to step 7; a rank is killed in step 16, and the restart goes on from step 14 of the new branch.
    once.unlink()
    finished = project.run("resume", run, "--step", "7", "--set", "launch.max_restarts=1")
    assert finished.code == 0, finished.text
    assert "restarting from the newest checkpoint (restart 1 of 1)" in finished.err
    log = (run / "logs" / "rank-0.log").read_text()
    assert re.findall(r"restored step-0*(\d+)", log) == ["7", "14"]
    assert losses(run) == first
    names = sorted(name.removeprefix("damaged-").removeprefix("aside-") for name in aside(run))
    assert names == ["step-00000014", "step-00000021", "step-00000028"]


def _damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
