"""`lockstep doctor` as a user runs it: what works is proved, what does not is named with its remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from conftest import ROOT, Project, Started

HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def by_name(text: str) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_what_is_here_as_json(project: Project) -> None:
    finished = project.run("doctor", "--json", env={**HIDE_GPUS, "SECRET_TOKEN": "hunter2"})
    assert finished.code == 0, finished.text
    assert json.loads(finished.out)["verdict"] in ("ok", "warn")
    checks = by_name(finished.out)
    assert all(set(check) == {"name", "verdict", "found", "remedy", "data"} for check in checks.values())
    assert {"python", "lockstep", "torch", "optional", "variables", "ports", "disk", "cpu", "cuda"} <= checks.keys()
    (cpu,) = checks["cpu"]["data"]["devices"]
    assert cpu["losses"][0] > cpu["losses"][1] and "/cpu/pid-" in cpu["identity"]
    assert checks["cuda"]["verdict"] == "none"
    assert checks["variables"]["data"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "hunter2" not in finished.text
    assert {path.name for path in project.folder.iterdir()} == {".stdout", ".stderr"}


def test_processes_come_together(project: Project) -> None:
    finished = project.run("doctor", "--runtime", "cpu", "--processes", "2")
    assert finished.code == 0, finished.text
    lines = {line[6:23].strip(): line for line in finished.out.splitlines()}
    assert "2 processes came together" in lines["processes on cpu"]
    assert "cuda" not in lines
    assert finished.out.splitlines()[-1].startswith("everything works")
    assert "\x1b" not in finished.out


def test_what_was_asked_for_and_does_not_work_fails_with_its_remedy(project: Project) -> None:
    (project.folder / "file").touch()
    finished = project.run("doctor", "--runtime", "cuda", "--out", project.folder / "file" / "runs", env=HIDE_GPUS)
    assert finished.code == 1, finished.text
    lines = finished.out.splitlines()
    assert lines[-1] == "does not work: disk, cuda"
    after = {line: following for line, following in pairwise(lines) if line.startswith("fail")}
    disk, cuda = after
    assert "cannot be written: Not a directory" in disk and "--out" in after[disk]
    assert "hidden by CUDA_VISIBLE_DEVICES" in cuda and "unset CUDA_VISIBLE_DEVICES" in after[cuda]


def test_without_torch_it_still_speaks(tmp_path: Path) -> None:
    """An environment that has Lockstep and click, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "click").symlink_to(Path(click.__file__).parent)
    modules = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'packages'}"}
    command = [tmp_path / "bare" / "bin" / "python", "-m", "lockstep", "doctor", "--runtime", "cpu", "--json"]
    finished = Started(command, tmp_path, modules).wait()
    assert finished.code == 1, finished.text
    checks = by_name(finished.out)
    assert {name for name, check in checks.items() if check["verdict"] == "fail"} == {"torch", "dependencies", "cpu"}
    assert checks["dependencies"]["found"].startswith("numpy: not installed; pydantic: not installed; yaml: not")
    assert checks["dependencies"]["remedy"].startswith("pip install --force-reinstall numpy pydantic PyYAML")
    assert checks["torch"]["remedy"].startswith("pip install torch")
    assert "Traceback" not in finished.text


def test_torch_is_not_blamed_for_another_package(project: Project) -> None:
    hidden = project.folder / "hidden" / "pydantic"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise RuntimeError('built for another Python')\n")
    arguments = ["doctor", "--json", "--runtime", "cpu", "--processes", "2"]
    finished = project.run(*arguments, env={**HIDE_GPUS, "PYTHONPATH": str(hidden.parent)})
    assert finished.code == 1, finished.text
    checks = by_name(finished.out)
    assert {name for name, check in checks.items() if check["verdict"] == "fail"} == {"dependencies", "cpu"}
    assert checks["dependencies"]["found"] == "pydantic: RuntimeError: built for another Python"
    assert "pydantic" in checks["dependencies"]["remedy"]
