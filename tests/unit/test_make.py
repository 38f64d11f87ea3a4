"""What `make test` runs: all of it in one command, with the XLA tests where torch_xla has a build."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from conftest import ROOT

NEEDS_TORCH_XLA = re.compile(r'importorskip\("torch_xla"|needs_torch_xla|find_spec\("torch_xla"\) is None')


def planned(machine: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    command = ["make", "--no-print-directory", "--dry-run", "test", f"MACHINE={machine}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout


def test_where_torch_xla_has_a_build_one_command_makes_both_environments_and_runs_what_needs_it() -> None:
    lines = planned("Linux x86_64")
    for part in (
        "environment test constraints/torch.txt",
        "environment test-xla constraints/xla.txt",
        "import torch_xla",
    ):
        assert part in lines
    runs = re.findall(r"^\.venv-test-xla/bin/python -m pytest .*$", lines, re.MULTILINE)
    paths = re.findall(r"tests/\S+", "\n".join(runs))
    assert len(runs) == 2, "those on Ray by themselves"
    needing = [path for path in (ROOT / "tests").rglob("test_*.py") if NEEDS_TORCH_XLA.search(path.read_text())]
    assert len(needing) >= 7
    for path in needing:
        name = str(path.relative_to(ROOT))
        assert any(name == each or name.startswith(f"{each}/") for each in paths) or path.name == "test_make.py", name


@pytest.mark.parametrize("machine", ["Linux aarch64", "Darwin arm64", "Darwin x86_64"])
def test_elsewhere_one_line_says_what_is_left_out_and_why(machine: str) -> None:
    lines = planned(machine)
    assert "xla.txt" not in lines and ".venv-test-xla" not in lines
    (told,) = [line for line in lines.splitlines() if line.startswith("echo")]
    assert "tests/xla" in told and f"torch_xla has no build for {machine}" in told
