"""Every benchmark still runs: what it measures with a tiny model or for a moment means nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

ROWS = re.findall(r"^\| `(\w+\.py)` \|(.*)\|$", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
NEEDS = {
    "hosts.py": None,  # network namespaces, which root makes: tests/hosts
    "xla.py": "torch_xla",
    "gpu_titan.py": "torchtitan",
    "elastic.py": "transformers",
    "plan.py": "transformers",
    "ray.py": "ray",
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, _ in ROWS if NEEDS.get(name, "torch")])
def test_a_benchmark_runs(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    how = "--tiny" if name.startswith("gpu") else "--quick"
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), how], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert "| ---" in ran.stdout
