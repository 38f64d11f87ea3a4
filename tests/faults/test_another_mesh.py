"""A run that was spread over three ranks and lost one goes on, on another mesh, where it was."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, losses, steps_saved

# A batch of 12 is 4, 6 or 3 examples per rank; 80 examples are seven steps to an epoch, the last of them short.
STEPS, PER_EPOCH = 21, 7
SETTINGS: dict[str, Any] = {
    # What ranks have seen, and whether one was killed already, is in the folder that a command is run in.
    "task": {
        "type": f"{TASK_FILE}:Recording",
        "record": "seen",
        "sleep": 0.05,
        "fail_at": {"rank": 2, "step": 10, "how": "kill", "once": "killed"},
    },
    "processes": 3,
    "strategy": "fsdp",
    "train": {"epochs": 3, "batch_size": 12},
    "checkpoint": {"every": "4 steps"},
    "optimizer": {"type": "torch.optim.AdamW", "lr": 0.01},
}


def new_project(folder: Path, undisturbed: bool) -> Project:
    folder.mkdir()
    if undisturbed:
        (folder / "killed").touch()
    return Project(folder)


@dataclass(frozen=True)
class Before:
    """A run that nothing disturbed, and one of which a rank was killed in its tenth step."""

    reference: Path
    run: Path
    everything: list[int]  # the examples of an epoch
    seen: list[list[list[int]]]  # by rank and step, until the rank was killed


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    folder = tmp_path_factory.mktemp("before")
    quiet, disturbed = new_project(folder / "quiet", True), new_project(folder / "disturbed", False)
    reference = quiet.train(**SETTINGS)
    everything = sorted(chain(*chain(*(steps[:PER_EPOCH] for steps in seen(quiet.folder)))))
    assert everything == sorted(set(everything)) and len(everything) == 80
    finished = disturbed.run("train", disturbed.config(**SETTINGS))
    assert finished.code == 5 and "rank 2 of 3" in finished.err, finished.text
    return Before(reference, disturbed.only_run(), everything, seen(disturbed.folder))


def seen(folder: Path) -> list[list[list[int]]]:
    """The examples by rank and step."""
    files = sorted(folder.glob("seen-*"))
    return [[[int(number) for number in line.split()] for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        pytest.param(2, "fsdp", id="fsdp on 2"),
        pytest.param(4, "{type: hsdp, mesh: {replica: 2, data: 2}}", id="hsdp 2x2", marks=pytest.mark.long),
        pytest.param(2, "ddp", id="ddp on 2", marks=pytest.mark.long),
    ],
)
def test_a_killed_run_goes_on_and_sees_what_was_left_once(
    tmp_path: Path, before: Before, processes: int, strategy: str
) -> None:
    project = new_project(tmp_path / "again", True)
    run = project.folder / "run"
    shutil.copytree(before.run, run)
    step = max(steps_saved(run))
    assert step in (4, 8)
    resumed = project.run("resume", run, "--set", f"processes={processes}", "--set", f"strategy={strategy}")
    assert resumed.code == 0, resumed.text
    assert f"restored step-{step:08d}" in resumed.out
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(losses(before.reference), rel=1e-5)
    after = seen(project.folder)
    assert len(after) == processes
    epoch, done = divmod(step, PER_EPOCH)
    of_the_epoch = [*(steps[epoch * PER_EPOCH : step] for steps in before.seen)]
    of_the_epoch += [steps[: PER_EPOCH - done] for steps in after]
    assert sorted(chain(*chain(*of_the_epoch))) == before.everything, "what came before the checkpoint, and after it"
