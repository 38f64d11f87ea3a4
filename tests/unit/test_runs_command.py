"""`lockstep runs`: real runs, listed, compared and removed; and what must never be removed."""

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
from lockstep.errors import ConfigError
from lockstep.record import folder_lock, run_folder
from lockstep.runs import cleaning, table

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
    assert found["broken"]["reason"]
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


def test_a_folder_that_is_none_and_a_misspelt_command(runs: Path) -> None:
    result = lockstep("runs", "claen")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "claen: there is no such folder; did you mean lockstep runs clean?" in result.stderr
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
    assert (
        json.loads(lockstep("runs", "clean", "--status", "completed", "--with-checkpoints", "--json").stdout)["runs"]
        != []
    ), "quick is to be listed"
    lockstep("runs", "clean", "--status", "completed", "--with-checkpoints", "--yes")
    assert (sweep / "trial-00000").is_dir()


def test_a_clean_up_lists_first_and_removes_only_with_yes(runs: Path) -> None:
    before = sorted(each.name for each in runs.iterdir())
    broken = run(runs, "broken")
    result = lockstep("runs", "clean")
    assert result.exit_code == 0
    assert f"{broken.name}  failed" in result.stdout and "would be removed" in result.stdout
    assert "Nothing was removed: add --yes to do it" in result.stderr
    assert sorted(each.name for each in runs.iterdir()) == before
    result = lockstep("runs", "clean", "--yes")
    assert "removed: 1 run" in result.stderr
    assert sorted(each.name for each in runs.iterdir()) == [name for name in before if name != broken.name]


def test_by_status_and_age_and_only_with_its_checkpoints_where_that_is_said(runs: Path) -> None:
    assert "nothing to remove" in lockstep("runs", "clean", "--older-than", "1h", "--yes").stderr
    result = lockstep("runs", "clean", "--status", "completed", "--yes")
    assert result.stdout.count("is kept: has ") == 2 and "--with-checkpoints" in result.stdout
    assert run(runs, "slow").is_dir()
    result = lockstep("runs", "clean", "--status", "completed", "--name", "slow", "--with-checkpoints", "--yes")
    assert not list(runs.glob("slow-*")) and run(runs, "quick").is_dir()
    assert "not an age" in lockstep("runs", "clean", "--older-than", "soon").stderr


def test_never_a_run_that_is_at_work(runs: Path, hold: Callable[[Path], None]) -> None:
    broken = run(runs, "broken")
    hold(broken)  # it was resumed, and its summary says failed until it writes another one
    lockstep("runs", "clean", "--yes", "--status", "running", "--status", "failed", "--with-checkpoints")
    assert broken.is_dir()
    # Also where it was free when it was chosen.
    with pytest.raises(ConfigError, match="another run is at work"):
        cleaning.remove(broken, with_checkpoints=True)
    assert (broken / "summary.json").is_file()


def test_never_what_is_no_run_or_holds_something_else(runs: Path, tmp_path: Path) -> None:
    broken = run(runs, "broken")
    (broken / "notes.txt").write_text("why it broke")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run(runs, "quick"), elsewhere)
    (runs / "linked").symlink_to(elsewhere)
    waiting = copy_of(runs, "broken", "waiting")
    for name in ("summary.json", "timeline.jsonl", "notes.txt", "live.json"):
        (waiting / name).unlink(missing_ok=True)
    everything = [f"--status={each}" for each in ("failed", "completed", "lost", "queued")]
    result = lockstep("runs", "clean", *everything, "--with-checkpoints", "--yes")
    assert "is kept: holds notes.txt, which no run writes" in result.stdout
    assert "may be waiting in a queue" in result.stdout
    left = {each.name for each in runs.iterdir()}
    assert left == {broken.name, "linked", "project", waiting.name}
    assert (elsewhere / "checkpoints").is_dir()
    with pytest.raises(ConfigError, match="not the folder of a run"):
        cleaning.remove(runs / "project", with_checkpoints=True)


@pytest.mark.parametrize(
    "name", ["aside-step-00000004", "damaged-step-00000004-2", ".partial-replaced-step-00000004-77"]
)
def test_a_checkpoint_under_another_name_is_a_checkpoint(runs: Path, name: str) -> None:
    broken = run(runs, "broken")
    (broken / "checkpoints" / name).mkdir(parents=True)
    assert "nothing to remove" in lockstep("runs", "clean", "--yes").stderr
    result = lockstep("runs", "clean", "--status", "failed", "--yes")
    assert f"is kept: has {name}, which may be the only checkpoint left: --with-checkpoints" in result.stdout
    assert (broken / "checkpoints" / name).is_dir()
    with pytest.raises(ConfigError, match="with-checkpoints"):
        cleaning.remove(broken, with_checkpoints=False)
    lockstep("runs", "clean", "--status", "failed", "--with-checkpoints", "--yes")
    assert not broken.exists()


@pytest.mark.parametrize(
    "name", ["samples/best.png", "samples/step-00000002/notes.md", "logs/why.txt", "checkpoints/mine/model.pt"]
)
def test_files_of_users_inside_of_a_runs_folders_are_kept(runs: Path, name: str) -> None:
    broken = run(runs, "broken")
    for ours in ("samples/step-00000002/a/b.png", "logs/rank-11.log", "logs/.nfs0001", "code/task.py"):
        (broken / ours).parent.mkdir(parents=True, exist_ok=True)
        (broken / ours).write_text("")
    (broken / name).parent.mkdir(parents=True, exist_ok=True)
    (broken / name).write_text("mine")
    result = lockstep("runs", "clean", "--with-checkpoints", "--yes")
    shown = "checkpoints/mine" if "mine" in name else name
    assert f"is kept: holds {shown}, which no run writes" in result.stdout
    shutil.rmtree(broken / shown) if "mine" in name else (broken / name).unlink()
    lockstep("runs", "clean", "--with-checkpoints", "--yes")
    assert not broken.exists()


def test_what_others_wrote_is_shown_as_text(runs: Path) -> None:
    broken = run(runs, "broken")
    (broken / "summary.json").write_text(json.dumps({"status": "failed", "reason": "\x1b[2Jgone", "step": "x"}))
    assert "\x1b" not in lockstep("runs").stdout
    (broken / "summary.json").write_text("[" * 5000)
    (broken / "metrics.jsonl").write_bytes(b"\xff\xfe\n{}")
    assert listed()[broken.name]["status"] == "failed"  # as its timeline says


def test_ages() -> None:
    assert [cleaning.age(each) for each in ("90s", "5min", "2h", "7d", "1.5w")] == [90, 300, 7200, 604800, 907200]


def test_a_thousand_runs_are_listed_in_seconds(runs: Path) -> None:
    for number in range(20):
        copy_of(runs, "slow", f"copy{number}")
    began = time.process_time()
    assert len(table.found(runs)) == 23
    assert time.process_time() - began < 23 * 0.02
