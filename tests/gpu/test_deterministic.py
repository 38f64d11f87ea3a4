"""train.deterministic on a GPU: run twice, and killed and resumed, the weights end with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("deterministic_program.py")


def digest(folder: Path, compiled: str, kill_at: int = 0) -> str | None:
    """What the program prints in a process of its own; None if it was killed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, str(PROGRAM), str(folder), device, compiled, str(kill_at)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == (-9 if kill_at else 0), ended.stdout + ended.stderr
    found = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("DIGEST")]
    return found[0] if found else None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", ["eager", "compiled"])
def test_run_twice_and_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path, compiled: str) -> None:
    whole = digest(tmp_path / "whole", compiled)
    assert whole is not None
    assert digest(tmp_path / "again", compiled) == whole
    assert digest(tmp_path / "killed", compiled, kill_at=13) is None
    assert digest(tmp_path / "killed", compiled) == whole
