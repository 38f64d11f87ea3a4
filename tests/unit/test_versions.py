"""docs/versions.md: one version, and a changelog that fits it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

import lockstep
from conftest import ROOT
from lockstep.cli import main

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HEADINGS = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)


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
