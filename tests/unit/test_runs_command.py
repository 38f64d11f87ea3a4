"""`lockstep runs`: real runs, listed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lockstep as package
from conftest import TASK_FILE
from lockstep.cli import main
from lockstep.record import folder_lock, run_folder
from lockstep.runs import table

# Holds a folder until it is told to let go by a line, as a launcher does.
HOLD = """
import sys
from pathlib import Path
from lockstep.record import folder_lock
with folder_lock.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def lockstep(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def listed(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    result = lockstep("runs", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return {each["name"]: each for each in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that came to their end, one that failed at its second step, and one that is no run."""
    out = tmp_path_factory.mktemp("trained") / "runs"
    config: dict[str, Any] = {
        "task": {"type": f"{TASK_FILE}:Tiny"},
        "runtime": "cpu",
        "processes": 1,
        "train": {"epochs": 2, "batch_size": 12},
        "data": {"split": {"train": 0.8, "val": 0.2}},
    }
    for name, rate in (("slow", 0.01), ("quick", 0.5)):
        package.train(config, out=out, name=name, optimizer={"type": "torch.optim.SGD", "lr": rate})
    failing = {**config["task"], "fail_at": {"rank": 0, "step": 2, "how": "exception"}}
    with pytest.raises(Exception):  # noqa: B017  whatever the task raises
        package.train(config, out=out, name="broken", task=failing)
    (out / "project").mkdir()
    (out / "project" / "config.yaml").write_text("task: task.py:Mine\n")
    return out


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as `runs` in the current folder."""
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    held: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> None:
        command = [sys.executable, "-c", HOLD, str(folder)]
        held.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert held[-1].stdout is not None and held[-1].stdout.readline() == "held\n"

    yield start
    for each in held:
        each.communicate("\n", timeout=30)


def run(runs: Path, name: str) -> Path:
    (found,) = runs.glob(f"{name}-*")
    return found


def copy_of(runs: Path, name: str, new: str, **summary: Any) -> Path:
    """A run as it would be found with another summary; None leaves the summary out."""
    folder = runs / f"{new}-20260101-000000"
    shutil.copytree(run(runs, name), folder)
    file = folder / run_folder.SUMMARY_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **summary}))
    if summary.get("status") == "running":
        (folder / "timeline.jsonl").unlink()  # which says that it has ended
        (folder / "live.json").unlink(missing_ok=True)
    return folder


def test_the_runs_of_a_folder_with_how_they_went(runs: Path) -> None:
    found = {name.rsplit("-", 2)[0]: each for name, each in listed().items()}
    assert set(found) == {"slow", "quick", "broken"}
    assert {name: each["status"] for name, each in found.items()} == {
        "slow": "completed",
        "quick": "completed",
        "broken": "failed",
    }
    slow = json.loads((run(runs, "slow") / "summary.json").read_text())
    assert found["slow"]["step"] == slow["step"] == 14
    assert (found["slow"]["best"], found["slow"]["metric"]) == (slow["best"]["value"], "val/loss")
    assert found["slow"]["seconds"] == slow["seconds"]
    assert found["broken"]["reason"] and found["slow"]["metrics"]["val/loss"] == slow["metrics"]["val/loss"]
    shown = lockstep("runs").stdout
    head, *lines = shown.splitlines()
    assert head.split()[:3] == ["run", "status", "epoch"]
    assert len(lines) == 3 and "\x1b" not in shown
    assert f"{slow['best']['value']:.4g}" in shown


def test_sorted_and_filtered(runs: Path) -> None:
    best = [name.rsplit("-", 2)[0] for name in listed("--sort", "best")]
    assert best == ["quick", "slow", "broken"]  # the lower loss first, and who has none last
    assert [name.rsplit("-", 2)[0] for name in listed("--sort", "best", "--reverse")] == ["slow", "quick", "broken"]
    assert [name.rsplit("-", 2)[0] for name in listed("--status", "failed")] == ["broken"]
    assert [name.rsplit("-", 2)[0] for name in listed("--name", "lo")] == ["slow"]
    assert set(listed("--name", "b*", "--name", "q*")) == {run(runs, "broken").name, run(runs, "quick").name}
    assert "there are no runs that fit" in lockstep("runs", "--name", "nobody").stderr


def test_a_folder_that_is_none(runs: Path) -> None:
    result = lockstep("runs", "nowhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere: there is no such folder; runs are in runs/" in result.stderr
    assert "is a run itself" in lockstep("runs", run(runs, "slow")).stderr
    assert "copy them here first" in lockstep("runs", "s3://bucket/runs").stderr


def test_running_only_while_somebody_is_at_work(runs: Path, hold: Callable[[Path], None]) -> None:
    one = copy_of(runs, "slow", "one", status="running")
    two = copy_of(runs, "slow", "two", status="running")
    hold(one)
    found = listed()
    assert (found[one.name]["status"], found[two.name]["status"]) == ("running", "lost")
    assert "its launcher, process" in found[one.name]["held_by"]
    assert folder_lock.held_by(two) is None
    (two / "summary.json").unlink()
    assert listed()[two.name]["status"] == "queued"


def test_the_trials_of_a_sweep_are_runs_too(runs: Path) -> None:
    sweep = runs / "some-sweep-20260101-000000"
    sweep.mkdir()
    (sweep / "sweep.yaml").write_text("space: {}\n")
    shutil.move(run(runs, "slow"), sweep / "trial-00000")
    assert f"{sweep.name}/trial-00000" in listed()
    shutil.rmtree(sweep / "trial-00000")
    assert "no trial of this sweep has begun yet" in lockstep("report", sweep).stderr


def test_what_others_wrote_is_shown_as_text(runs: Path) -> None:
    broken = run(runs, "broken")
    (broken / "summary.json").write_text(json.dumps({"status": "failed", "reason": "\x1b[2Jgone", "step": "x"}))
    assert "\x1b" not in lockstep("runs").stdout
    (broken / "summary.json").write_text("[" * 5000)
    (broken / "metrics.jsonl").write_bytes(b"\xff\xfe\n{}")
    assert listed()[broken.name]["status"] == "failed"  # as its timeline says


def test_a_thousand_runs_are_listed_in_seconds(runs: Path) -> None:
    for number in range(20):
        copy_of(runs, "slow", f"copy{number}")
    began = time.process_time()
    assert len(table.found(runs)) == 23
    assert time.process_time() - began < 23 * 0.02
