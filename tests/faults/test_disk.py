"""A disk that is full or cannot be written to: said in time, and nothing that was saved is lost."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, small_file_system, steps_saved

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")

FSDP = "fsdp"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "400k") as disk:
        yield disk


@as_root
@pytest.mark.parametrize(
    ("asynchronous", "strategy"),
    [
        (True, "ddp"),
        pytest.param(False, "ddp", marks=pytest.mark.long),
        pytest.param(True, FSDP, id="True-fsdp", marks=pytest.mark.long),
    ],
)
def test_full_disk_while_saving(project: Project, small_disk: Path, asynchronous: bool, strategy: Any) -> None:
    config = project.config(
        strategy=strategy,
        task={"type": f"{TASK_FILE}:Tiny", "sleep": 0.02},
        checkpoint={"every": "1 step", "keep": {"last": 100}, "async": asynchronous},
        train={"epochs": 20, "batch_size": 12},
        log={"every": "1000 steps"},
    )
    finished = project.run("train", config, "--out", small_disk)
    assert finished.code == 5
    assert "could not be written" in finished.err and "No space left on device" in finished.err
    assert "make room" in finished.err and re.search(r"It needs [\d.]+ k?B and [\d.]+ k?B are free", finished.err)
    assert "Traceback" not in finished.err
    (run,) = small_disk.iterdir()
    saved = steps_saved(run)
    assert saved, "what fitted is still there"
    assert not list((run / "checkpoints").glob(".partial-*")), "nothing half written stays"
    for step in saved[:-1]:  # make room, as the message says
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    resumed = project.run("resume", run, "--set", "checkpoint={every: 100 steps, keep: {last: 1, best: 0}}",
                          "--set", f"train={{steps: {max(saved) + 2}, batch_size: 12}}")  # fmt: skip
    assert resumed.code == 0, resumed.text
    assert f"restored step-{max(saved):08d}" in resumed.out


@as_root
@pytest.mark.parametrize("what", ["log", "checkpoint"])
def test_the_file_that_found_no_room_is_named(project: Project, small_disk: Path, what: str) -> None:
    fail_at = {"rank": 0, "step": 3, "how": "fill", "file": str(small_disk / "filler")}
    config = project.config(
        task={"type": f"{TASK_FILE}:Tiny", "fail_at": fail_at, "sleep": 0.02},
        train={"steps": 100, "batch_size": 12},
        log={"every": "1 step" if what == "log" else "1000 steps"},
        checkpoint={"every": "100 steps" if what == "log" else "2 steps"},
    )
    finished = project.run("train", config, "--out", small_disk)
    (run,) = [each for each in small_disk.iterdir() if each.is_dir()]
    assert finished.code == 5 and "Traceback" not in finished.err, finished.err
    assert "No space left on device" in finished.err and "make room" in finished.err
    if what == "log":
        assert re.search(rf"metrics\.jsonl'; {run} has [\d.]+ k?B free\. Checkpoints", finished.err)
    else:
        assert re.search(r"checkpoints/\S+: the checkpoint could not be written: .* [\d.]+ k?B are free", finished.err)
    assert not list(run.glob(".report.html.*"))


def test_an_output_folder_that_cannot_be_made_is_refused_before_any_process_starts(project: Project) -> None:
    (project.folder / "file").write_text("in the way")
    finished = project.run("train", project.config(), "--out", project.folder / "file" / "runs")
    assert finished.code == 2
    assert "--out" in finished.err and "cannot be made there" in finished.err
    assert "Traceback" not in finished.err


def test_an_unwritable_output_folder(project: Project) -> None:
    closed = project.folder / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    out: Path = closed
    if os.geteuid() == 0:
        out = Path("/proc/lockstep-runs")  # where even root may not write
    finished = project.run("train", project.config(), "--out", out)
    assert finished.code == 2
    assert "Name a writable folder with --out" in finished.err


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_never_costs_a_good_one(project: Project) -> None:
    """It is newer than what is saved after the resume, so that whoever counts it keeps it in place of good ones."""
    run = project.train(
        train={"steps": 10, "batch_size": 12}, checkpoint={"every": "5 steps", "keep": {"last": 2, "best": 0}}
    )
    assert steps_saved(run) == [5, 10]
    folder = run / "checkpoints"
    flip_a_bit(folder / "step-00000010" / "model.safetensors")
    damaged = (folder / "step-00000010" / "model.safetensors").read_bytes()
    fewer = ("--set", "checkpoint={every: 1 step, keep: {last: 1, best: 0}}", "--set", "train.steps=7")
    resumed = project.run("resume", run, *fewer)
    assert resumed.code == 0, resumed.text
    assert "checkpoint step-00000010 is damaged and is passed over: " in resumed.text
    assert "model.safetensors does not match its digest in the manifest" in resumed.text
    assert "restored step-00000005" in resumed.text
    assert "set aside as damaged-step-00000010" in resumed.text
    assert steps_saved(run) == [7]
    assert (folder / "damaged-step-00000010" / "model.safetensors").read_bytes() == damaged
    again = project.run("resume", run, "--set", "train.steps=8")
    assert again.code == 0, again.text
    assert "restored step-00000007" in again.text and "is damaged" not in again.text
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["damaged-step-00000010", "step-00000008"]


def test_checkpoints_of_which_none_can_be_used_are_not_a_new_run(project: Project) -> None:
    run = project.train(
        train={"steps": 4, "batch_size": 12}, checkpoint={"every": "2 steps", "keep": {"last": 2, "best": 0}}
    )
    for step in (2, 4):
        flip_a_bit(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    before = (run / "metrics.jsonl").read_bytes()
    refused = project.run("resume", run, "--set", "train.steps=6")
    assert refused.code == 5, refused.text
    assert "checkpoints: of 2 checkpoints none can be used, and nothing was begun anew" in refused.err
    assert "To start over on purpose, move or delete " in refused.err and "Traceback" not in refused.err
    assert steps_saved(run) == [2, 4] and (run / "metrics.jsonl").read_bytes() == before
    (run / "checkpoints").rename(run / "old")
    anew = project.run("resume", run)
    assert anew.code == 0 and "restored" not in anew.text, anew.text
    assert steps_saved(run)[-1] == 6
