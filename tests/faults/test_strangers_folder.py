"""A run's folder that comes from a stranger is data: commands follow no link in it and write through none."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import Project
from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.mirror.mark import mirrored

# Every file and folder that a resumed run would write.
WRITTEN = (
    ".lock", ".lock-rank", "config.yaml", "summary.json", "topology.json", "metrics.jsonl", "timeline.jsonl",
    "live.json", "lags.jsonl", "report.html", "logs/rank-0.log", "logs", "checkpoints", "samples", "tensorboard",
)  # fmt: skip
# Names that temporary files had, which anybody could know.
TEMPORARY = (
    ".report.html.partial", ".summary.json.partial", ".config.yaml.partial", ".live.json.partial",
    ".topology.json.partial", "metrics.partial", "checkpoints/.gone_back", ".bucket.json.partial",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = Project(tmp_path_factory.mktemp("trained"))
    return project.train(processes=1, train={"steps": 4, "batch_size": 12}, checkpoint={"every": "2 steps"})


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs" / "gift", symlinks=True))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """What a stranger is after: a test in which any of it changes fails."""
    folder = tmp_path / "home"
    (folder / "keys").mkdir(parents=True)
    (folder / "authorized_keys").write_text("ssh-ed25519 mine\n")
    yield folder
    assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*")) == ["authorized_keys", "keys"]
    assert (folder / "authorized_keys").read_text() == "ssh-ed25519 mine\n"


def plant(run: Path, name: str, home: Path, dangling: bool = False) -> Path:
    """A link in the run's folder, in the place of what may be there: to a file, a folder, or what is not there yet."""
    place = run / name
    is_folder = name in ("logs", "checkpoints", "samples", "tensorboard")
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(home / ("keys" if is_folder else "new" if dangling else "authorized_keys"))
    return place


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_the_place_of_what_a_run_writes_is_refused_by_name(run: Path, home: Path, name: str) -> None:
    for dangling in (False, True):
        place = plant(run, name, home, dangling)
        told = CliRunner().invoke(main, ["resume", str(run), "--set", "train.steps=6"])
        assert told.exit_code == 2 and not isinstance(told.exception, OSError), told.output
        assert str(place) in told.output and "a link" in told.output, told.output


def test_a_second_name_of_a_file_is_not_written_to(run: Path, home: Path) -> None:
    (run / ".lock").unlink(missing_ok=True)
    os.link(home / "authorized_keys", run / ".lock")
    told = CliRunner().invoke(main, ["resume", str(run), "--set", "train.steps=6"])
    assert told.exit_code == 2 and f"{run}/.lock" in told.output and "hard link" in told.output, told.output
    (run / ".lock").unlink()


def test_names_that_temporary_files_had_lead_nowhere(run: Path, home: Path) -> None:
    """One start, with a link under each of them; then a report and an evaluation of the same run."""
    for name in TEMPORARY:
        plant(run, name, home)
    project = Project(run.parent.parent)
    finished = project.run("resume", run, "--set", "train.steps=6", "--step", "2")
    assert finished.code == 0, finished.text
    assert json.loads((run / "summary.json").read_text())["step"] == 6
    for name in ("report.html", "evaluations.jsonl"):
        plant(run, name, home)
    told = CliRunner().invoke(main, ["report", str(run)])
    assert told.exit_code == 0 and stat.S_ISREG((run / "report.html").lstat().st_mode), told.output
    finished = project.run("evaluate", run, "--data", "val")
    assert finished.code == 0 and "evaluations.jsonl: not written: it is a link" in finished.text, finished.text


def test_a_mark_of_a_bucket_counts_at_its_own_place_alone(run: Path, home: Path) -> None:
    """A stranger's would have the run uploaded to any folder that file:// can name."""
    (run / ".bucket.json").write_text(json.dumps({"url": f"file://{home}", "tokens": []}))
    for command in (["resume", str(run), "--set", "train.steps=6"],):
        told = CliRunner().invoke(main, command)
        assert told.exit_code == 2 and f"names file://{home}" in told.output, told.output
    with pytest.raises(ConfigError, match=r"not this host's copy of it"):
        mirrored(run, None, print)  # type: ignore[arg-type]
    assert CliRunner().invoke(main, ["report", str(run)]).exit_code == 0


@pytest.mark.parametrize("name", ["best.yaml", "sweep.json", "sweep.yaml", "trial-00000", "trial-00000/config.yaml",
                                  "trial-00000/summary.json"])  # fmt: skip
def test_a_sweep_is_shown_without_following_a_link(run: Path, home: Path, name: str) -> None:
    folder = run.parent / "sweep"
    folder.mkdir()
    run.rename(folder / "trial-00000")
    (folder / "sweep.yaml").write_text("space: {seed: [1, 2]}\n")
    trial = {"number": 0, "values": {"seed": 1}, "status": "completed", "epoch": 1, "metric": 0.5}
    (folder / "sweep.json").write_text(json.dumps([trial, {**trial, "number": 1, "metric": 10**400, "epoch": "x"}]))
    if name == "trial-00000":
        (folder / name).rename(run.parent / "elsewhere")
        (folder / name).symlink_to(run.parent / "elsewhere")
    else:
        plant(folder, name, home)
    told = CliRunner().invoke(main, ["sweep", str(folder)])
    assert told.exception is None or isinstance(told.exception, SystemExit), told.output
    if name in ("best.yaml", "trial-00000/summary.json"):
        assert told.exit_code == 0 and "best: trial 0, val/loss " in told.output, told.output
        assert (folder / "best.yaml").read_text().startswith("# What this run was started")
    else:
        assert told.exit_code == 2 and not (folder / "best.yaml").exists()
        assert "a link" in told.output or "it holds no sweep.yaml" in told.output, told.output


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_who_runs_the_code_that_another_user_chose_is_told_once(run: Path) -> None:
    config = run / "config.yaml"
    commands = {
        "resume": [run, "--dry-run"], "evaluate": [run, "--step", "99"], "plan": [config, "--on", "none"],
        "predict": [run, "--step", "99", "--out", "a.jsonl"], "verify": [config, "--only", "none"],
    }  # fmt: skip
    for owner, count in ((os.geteuid(), 0), (64999, 1)):
        for each in (run, config):
            os.chown(each, owner, -1)
        for name, arguments in commands.items():
            told = CliRunner().invoke(main, [name, *map(str, arguments)])
            assert told.output.count("belongs to uid 64999, and this command imports and runs") == count, told.output
    for name in ("report", "watch"):
        assert "belongs to" not in CliRunner().invoke(main, [name, str(run)]).output
