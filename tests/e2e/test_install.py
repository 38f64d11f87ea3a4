"""What is released: a wheel and a source distribution, installed from scratch, and the tutorial followed with them."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pydantic
import pytest

from conftest import ROOT
from pages import run_page

SOURCES = ROOT / "src"
TUTORIAL = ROOT / "docs" / "tutorial.md"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    finished = subprocess.run(command, cwd=cwd, env={**plain, **variables}, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "scripts" / "distributions.py", "--out", out, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    files = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    names = zipfile.ZipFile(wheel).namelist()
    about = {name for name in names if ".dist-info/" in name}
    assert set(names) - about == files
    assert {name.partition("/")[2] for name in about} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE",
    }  # fmt: skip
    assert {"lockstep/py.typed", "lockstep/templates/config.yaml", "lockstep/planner/devices.yaml"} <= set(names)


def test_the_wheel_says_who_made_it_under_which_terms_and_what_it_needs(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    archive = zipfile.ZipFile(wheel)
    (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Name"] == "lockstep-train" and metadata["Version"] == project["version"]
    assert metadata["Author"] == "The Lockstep authors" and metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert metadata.get_payload().startswith("# Lockstep")  # type: ignore[union-attr]


def test_the_source_distribution_has_the_sources_alone(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/lockstep/templates/task.py.txt"} <= names
    assert not {name for name in names if "__pycache__" in name or name.startswith(("tests", "build", "."))}


def test_the_tree_and_the_source_distribution_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    code = (
        "import sys; from pathlib import Path; import distributions as d; "
        "d.copy_sources(Path(sys.argv[1])); print(d.build('wheel', Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    run(sys.executable, "-c", code, sources, tmp_path, cwd=ROOT / "scripts", PYTHONPATH=str(ROOT / "scripts"))
    (direct,) = tmp_path.glob("*.whl")

    def content(path: Path) -> dict[str, int]:
        return {each.filename: each.CRC for each in zipfile.ZipFile(path).infolist()}

    assert content(direct) == content(wheel)


def test_from_the_wheel_to_a_resumed_run_as_the_tutorial_says(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the dependencies of this one, and the project from nowhere but the wheel."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python3.*/site-packages")
    dependencies = Path(pydantic.__file__).parents[1]
    (packages / "dependencies.pth").write_text(f"import site; site.addsitedir({str(dependencies)!r})\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    follow_the_tutorial(environment, tmp_path)


@pytest.mark.long
def test_from_the_registry_to_a_resumed_run_as_the_tutorial_says(built: Path, tmp_path: Path) -> None:
    """With all that pip finds by itself: from the source distribution, with a build environment of its own."""
    (sdist,) = built.glob("*.tar.gz")
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    constraints = ROOT / "constraints" / "torch.txt"
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", constraints, sdist, cwd=tmp_path)
    follow_the_tutorial(environment, tmp_path)


def follow_the_tutorial(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    code = "import lockstep, sys; print(lockstep.__file__, lockstep.__version__)"
    place, version = run(environment / "bin" / "python", "-c", code, cwd=folder).split()
    assert Path(place).is_relative_to(environment)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    shell = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    said = run_page(TUTORIAL, folder, {**shell, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"})
    assert "exit code 75" in said and "restored step-" in said
    summaries = [json.loads(path.read_text()) for path in folder.glob("runs/*/demo-*/summary.json")]
    assert [(each["status"], each["step"]) for each in summaries] == [("completed", 500)] * 2
