"""How a script was started, as its run's folder keeps it, and the command that starts it again."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.topology import Place, Topology
from lockstep.errors import ConfigError
from lockstep.launchers.script import (
    RESUME_FOLDER,
    SCRIPT_FILE,
    Script,
    folder_to_resume,
    read,
    running,
    start_again,
    write,
)
from lockstep.record import run_folder

RANK = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    run = tmp_path / "a run"
    run.mkdir()
    return run


def script(folder: Path, **values: Any) -> Script:
    usual = {"script": str(folder.parent / "train.py"), "directory": str(folder.parent), "function": "main"}
    return Script(**{**usual, **values})


def test_what_is_written_is_plain_and_reads_back(folder: Path) -> None:
    made = script(folder, arguments=("--lr", "0.1", "two words"), call=2, processes=4)
    write(folder, made)
    assert read(folder) == made
    plain = yaml.safe_load((folder / SCRIPT_FILE).read_text())
    assert plain["arguments"] == ["--lr", "0.1", "two words"]


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "a secret")
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    main = types.ModuleType("__main__")
    main.__file__ = "mine/__main__.py"
    main.__spec__ = importlib.machinery.ModuleSpec("mine.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = running("main", 1, RunSettings(seed=7), None)
    assert (found.module, found.script, found.arguments) == ("mine", None, ("--epochs", "3"))
    assert (found.directory, found.processes, found.settings["seed"]) == (str(Path.cwd()), None, 7)
    assert "a secret" not in found.model_dump_json()
    ranks = Topology(Place(rank=1), world_size=4, local_world_size=2, port=1)
    assert (running("main", 1, RunSettings(), ranks).processes, running("main", 1, RunSettings(), ranks).hosts) == (
        4,
        2,
    )
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    typed = running("main", 1, RunSettings(), None)
    assert not typed.can_start
    assert typed.how_to_go_on(Path("runs/x")) == "lockstep.launch(main, folder='runs/x', ...) in this session"


def test_the_program_of_a_run_is_the_one_that_made_it(folder: Path) -> None:
    write(folder, script(folder, arguments=("--epochs", "1")))
    write(folder, script(folder, arguments=("--epochs", "9")))
    write(folder, script(folder, script=str(folder.parent / "evaluate.py")))
    write(folder, script(folder, function="evaluate"))
    found = read(folder)
    assert found is not None and found.command == [str(folder.parent / "train.py"), "--epochs", "9"]


def test_a_run_of_lockstep_train_stays_one(folder: Path) -> None:
    run_folder.write_config(folder, RunConfig.model_validate({"task": "task.py:Mine"}))
    write(folder, script(folder))
    assert not (folder / SCRIPT_FILE).exists()
    assert start_again(folder, {}, {}) is None


@pytest.mark.parametrize(
    ("values", "env", "expected"),
    [
        ({"arguments": ("-x", "1")}, {}, ["train.py", "-x", "1"]),
        ({"script": None, "module": "package.train"}, {}, ["-m", "package.train"]),
        ({"processes": 4}, {}, ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]),
        ({"processes": 4, "hosts": 2}, RANK, ["train.py"]),  # a launcher has started this process already
    ],
)
def test_the_command_that_goes_on(
    folder: Path, values: dict[str, Any], env: dict[str, str], expected: list[str]
) -> None:
    write(folder, script(folder, **values))
    again = start_again(folder, env, {"--set": (), "--profile": False})
    assert again is not None
    where = str(folder.parent)
    assert [each.removeprefix(f"{where}/") for each in again.argv] == [sys.executable, *expected]
    assert (again.variables, again.directory) == ({RESUME_FOLDER: str(folder)}, where)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"script": None}, {}, r"started from a notebook .* go on there with lockstep\.launch\(main, folder='"),
        ({"processes": 4, "hosts": 2}, {}, "started on 2 hosts: start `lockstep resume` on each of them"),
        ({"script": "/nowhere/train.py"}, {}, "script: there is no /nowhere/train.py any more"),
        ({}, {"--set": ("seed=3",)}, "--set: the run in .* has its settings in itself"),
    ],
)
def test_what_cannot_go_on_is_told(folder: Path, values: dict[str, Any], options: dict[str, Any], message: str) -> None:
    write(folder, script(folder, **values))
    with pytest.raises(ConfigError, match=message):
        start_again(folder, {}, options)


@pytest.mark.parametrize("text", ["[1, 2]", "script: [", "script: train.py"])
def test_a_file_that_says_nothing_of_use_is_named(folder: Path, text: str) -> None:
    (folder / SCRIPT_FILE).write_text(text)
    with pytest.raises(ConfigError, match=SCRIPT_FILE):
        start_again(folder, {}, {})


def test_a_folder_that_is_gone(folder: Path) -> None:
    write(folder, script(folder, directory="/nowhere"))
    again = start_again(folder, {}, {})
    assert again is not None
    with pytest.raises(ConfigError, match=f"/nowhere: the run was started there.*{RESUME_FOLDER}="):
        again.become()


def test_the_call_that_made_the_run_gets_its_folder_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, script(folder, call=2))
    monkeypatch.setenv(RESUME_FOLDER, str(folder))
    assert [folder_to_resume(call) for call in (1, 2, 2)] == [None, folder, None]


def test_resume_shows_what_it_would_start(folder: Path) -> None:
    write(folder, script(folder, arguments=("two words",)))
    shown = CliRunner().invoke(main, ["resume", str(folder), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"cd {folder.parent} && {RESUME_FOLDER}='{folder}' ")
    assert shown.output.rstrip().endswith(f"{folder.parent}/train.py 'two words'")
