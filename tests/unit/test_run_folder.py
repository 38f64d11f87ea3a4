"""A run's folder: named once, held by one run, and read back as it was written."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, FolderLost
from lockstep.record import run_folder
from lockstep.record.run_folder import keep_code

CONFIG = RunConfig.model_validate({"task": "task.py:Mine", "name": "mine", "early_stop": {"patience": 4}})


def test_a_new_folder_carries_the_name_and_the_time(tmp_path: Path) -> None:
    folder = run_folder.create(tmp_path / "runs", "mine")
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("mine-20")
    assert (folder / "logs").is_dir()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({run_folder.create(tmp_path, "mine") for _ in range(5)}) == 5


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ConfigError, match=f"--out {tmp_path}/runs: "):
        run_folder.create(tmp_path / "runs", "mine")


def test_a_config_reads_back(tmp_path: Path) -> None:
    run_folder.write_config(tmp_path, CONFIG)
    assert run_folder.read_config(tmp_path) == CONFIG
    assert run_folder.read_plain_config(tmp_path) == CONFIG.plain()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not the folder of a run: it holds no config.yaml"),
        ("a: [", "config.yaml: cannot be read"),
        ("", "config.yaml: not a config"),
        ("- 1\n", "config.yaml: not a config"),
    ],
)
def test_what_is_not_the_folder_of_a_run_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run_folder.read_config(tmp_path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not the folder of a run: there is no such folder"):
        run_folder.read_config(tmp_path / "nowhere")


def test_a_folder_that_was_moved_or_deleted_is_told_from_what_has_its_name_now(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "else where"
    folder.mkdir()
    anchor = run_folder.Anchor(folder)
    try:
        anchor.check()
        folder.rename(elsewhere)
        moved = f"run: the run's folder was moved to {elsewhere} while .* lockstep resume '{elsewhere}'"
        with pytest.raises(FolderLost, match=moved):
            anchor.check()
        folder.mkdir()
        with pytest.raises(FolderLost, match=moved):
            anchor.check()
        elsewhere.rmdir()
        with pytest.raises(FolderLost, match=r"run: the run's folder was deleted while the run was at work"):
            anchor.check()
    finally:
        anchor.close()


def test_a_failure_is_written_over_what_rank_0_wrote(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    run_folder.record(tmp_path, "failed", "first")
    assert json.loads(summary.read_text()) == {"status": "failed", "reason": "first"}
    summary.write_text('{"status": "completed", "step": 7}')
    run_folder.record(tmp_path, "failed", "second")
    assert json.loads(summary.read_text()) == {"status": "failed", "reason": "second", "step": 7}
    summary.write_text('{"status": "comp')
    run_folder.record(tmp_path, "failed", "third")
    assert json.loads(summary.read_text())["reason"] == "third"


def test_a_failure_that_cannot_be_written_down_hides_nothing(tmp_path: Path) -> None:
    run_folder.record(tmp_path / "nowhere", "failed", "the disk is gone")


def test_the_code_of_a_run_is_kept_without_its_secrets(tmp_path: Path) -> None:
    code, run = tmp_path / "project", tmp_path / "run"
    code.mkdir()
    run.mkdir()
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b"]
    (code / "task.py").write_text("lr = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    secret = 'api_key = "abc123abc"\nwandb_token: xyz\nurl = "https://me:pass@host/x"\npad_token = "<pad>"\n'
    dna = 3 * "acgt" * 2**16 + "\n"  # in one word, which is searched in no time
    (code / "task.py").write_text(f"lr = 2\n{secret}{dna}")
    told: list[str] = []
    began = time.process_time()
    keep_code(run, code, {"task.py": "1"}, told.append)
    assert time.process_time() - began < 5
    kept = json.loads((run / "code" / "1" / "code.json").read_text())
    assert len(kept["commit"]) == 40 and kept["uncommitted_changes"] and not told
    for text in (file.read_text() for file in (run / "code" / "1").iterdir()):
        assert not any(each in text for each in ("abc123abc", "xyz", "me:pass"))
    assert "+lr = 2" in (run / "code" / "1" / "uncommitted.diff").read_text()
    assert "<pad>" in (run / "code" / "1" / "task.py").read_text()
    keep_code(run, code, {"task.py": "1", "loaded_later.py": "5"}, told.append)
    assert not told and not (run / "code" / "2").exists()
    keep_code(run, code, {"task.py": "2"}, told.append)
    assert "the code changed since the run was last started: task.py" in told[0] and (run / "code" / "2").is_dir()
