"""docs/versions.md: one version, a changelog that fits it, and what happens to what is renamed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

import lockstep
from conftest import ROOT
from lockstep.cli import main
from lockstep.config import load as loading
from lockstep.config import renamed
from lockstep.config.renamed import RENAMED, Renamed
from lockstep.deprecated import DeprecatedWarning, renamed_argument
from lockstep.errors import ConfigError

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HEADINGS = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
OLD = Renamed("train.clip", "train.clip_norm", "0.7.0", "0.9.0")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removesuffix(".dev0").split("."))


def test_the_newest_section_of_the_changelog_is_the_version() -> None:
    expected = f"{VERSION.removesuffix('.dev0')} (unreleased)" if VERSION.endswith(".dev0") else VERSION
    assert HEADINGS[0] == expected
    assert not [heading for heading in HEADINGS[1:] if "unreleased" in heading]
    versions = [numbers(heading.split()[0]) for heading in HEADINGS]
    assert versions == sorted(set(versions), reverse=True)


def test_the_version_is_written_in_one_place() -> None:
    places = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"version\w* *= *[\"']\d", path.read_text())]
    assert not places
    assert lockstep.__version__ == VERSION
    assert VERSION in CliRunner().invoke(main, ["--version"]).output


def test_release_notes_are_the_section_of_a_version() -> None:
    def notes(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "scripts" / "release_notes.py"
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=60)

    newest = notes().stdout
    assert newest.startswith(f"# Lockstep {VERSION.removesuffix('.dev0')}\n\n") and "\n## " not in newest
    assert "roll call before step 1" in notes("0.2.0").stdout
    wrong = notes("7.0")
    assert wrong.returncode == 1 and "CHANGELOG.md has no version 7.0; it has" in wrong.stderr


def test_what_has_outlived_its_version_is_taken_out() -> None:
    for each in RENAMED:
        since, until = numbers(each.since), numbers(each.until)
        assert until[0] > since[0] or until[1] >= since[1] + 2, f"{each.old}: two minor versions, at least"
        assert until > numbers(VERSION), f"{each.old}: {VERSION} does not have it any more: remove the line"


@pytest.fixture
def old_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one(*arguments: object) -> object:
        return renamed.with_current_names(*arguments, renamed=[OLD])  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "with_current_names", with_one)


@pytest.mark.usefixtures("old_key")
def test_an_old_key_still_works_and_says_what_to_write(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    config.write_text("task: task.py:Mine\ntrain:\n  epochs: 2\n  clip: 0.5\n")
    told = (
        r"config\.yaml:4: train\.clip: is called train\.clip_norm since 0\.7\.0, and only that from 0\.9\.0 on: write"
    )
    with pytest.warns(DeprecatedWarning, match=told):
        assert loading.load(config).train.clip_norm == 0.5
    with pytest.warns(DeprecatedWarning, match=r"--set train\.clip=2\.0: train\.clip: is called"):
        config.write_text("task: task.py:Mine\n")
        assert loading.load(config, ["train.clip=2.0"]).train.clip_norm == 2.0
    config.write_text("task: task.py:Mine\ntrain: {clip: 0.5, clip_norm: 0.6}\n")
    with pytest.raises(ConfigError, match=r"train\.clip: is called train\.clip_norm now, which is given as well"):
        loading.load(config)
    config.write_text("task: task.py:Mine\ntrain: {clip: -1.0}\n")
    with (
        pytest.warns(DeprecatedWarning),
        pytest.raises(ConfigError, match=r"config\.yaml:2: train\.clip_norm: .*-1\.0"),
    ):
        loading.load(config)


@pytest.mark.usefixtures("old_key")
def test_the_command_line_says_it_in_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\ntrain: {clip: 0.5, epoch: 3}\n")
    said = CliRunner().invoke(main, ["train", str(tmp_path / "config.yaml")]).output
    assert re.search(r"^lockstep: \S+config\.yaml:2: train\.clip: is called train\.clip_norm since 0\.7\.0", said, re.M)
    assert "DeprecatedWarning" not in said and "train.epoch: unknown key, did you mean epochs?" in said


def test_without_anything_renamed_there_is_no_warning(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.load(tmp_path / "config.yaml")


def test_an_old_argument_still_works_and_says_what_to_write() -> None:
    @renamed_argument("size", "batch_size", since="0.7.0", until="0.9.0")
    def batches(batch_size: int = 1) -> int:
        return batch_size

    assert batches(batch_size=3) == batches(3) == 3
    with pytest.warns(DeprecatedWarning, match=r"batches: size is called batch_size since 0\.7\.0") as noted:
        assert batches(size=4) == 4  # type: ignore[call-arg]
    assert noted[0].filename == __file__
    with pytest.raises(TypeError, match="are the same argument, give batch_size alone"):
        batches(size=4, batch_size=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("statement", "ours", "others", "most"),
    [("import lockstep", 3, set(), 45), ("import lockstep.cli", 13, {"click"}, 115)],
)
def test_importing_stays_as_little_as_it_is(statement: str, ours: int, others: set[str], most: int) -> None:
    """Counted in modules, as seconds depend on the machine: 31 and 88 on Python 3.11, torch has 1,100."""
    code = (
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(list(set(sys.modules) - before)))"
    )
    command = [sys.executable, "-c", code]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    packages = {name.partition(".")[0] for name in loaded}
    assert packages - set(sys.stdlib_module_names) - {"lockstep"} == others
    assert len([name for name in loaded if name.partition(".")[0] == "lockstep"]) <= ours
    assert len(loaded) <= most, sorted(loaded)
