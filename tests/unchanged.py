"""Skips the tests of Ray, SLURM, SSH hosts and buckets while what they test has not changed (`--skip-unchanged`).

A folder that passed a whole `make test` leaves a mark in the cache, named by a digest of the folder, of the source that
it tests and of the environment. The next `make test` with the same digest runs only KEPT there; `make test-all` runs
everything. On a new machine there is no mark, so everything runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LAUNCHING = ("src/lockstep/launchers", "src/lockstep/worker.py", "src/lockstep/distributed")
SOURCES = {
    "tests/ray/": (
        *_LAUNCHING,
        "src/lockstep/ray",
        "src/lockstep/mirror",
        "tests/ray_cluster.py",
        "tests/ray_launching.py",
    ),
    "tests/slurm/": (*_LAUNCHING, "tests/slurm_cluster.py"),
    "tests/hosts/": (*_LAUNCHING, "tests/laptop.py", "tests/host_network.py"),
    "tests/storage/": ("src/lockstep/mirror", "src/lockstep/checkpoint", "src/lockstep/record", "tests/s3_server.py"),
}
ALWAYS = ("tests/conftest.py", "tests/tasks.py", "constraints/torch.txt", "pyproject.toml")
# One way through each of them, whatever has changed.
KEPT = (
    "tests/ray/test_ray_run.py::test_metrics_and_the_checkpoint_reach_ray",
    "tests/slurm/test_slurm.py::test_srun_over_two_nodes_trains_what_one_machine_does",
    "tests/hosts/test_ssh.py::test_three_hosts_train_as_one_machine_does",
    "tests/storage/test_runs_in_a_bucket.py",
)


def digest(folder: str) -> str:
    """Returns a digest of a folder of tests and of all that it tests."""
    found = hashlib.sha256(f"{sys.version} {os.uname().machine}".encode())
    for place in sorted({folder, *SOURCES[folder], *ALWAYS}):
        start = ROOT / place
        for file in [start] if start.is_file() else sorted(start.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:24]


def mark(folder: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    base = Path(os.environ.get("LOCKSTEP_CACHE") or f"{cache}/lockstep")
    return base / "passed" / f"{folder.strip('/').replace('/', '-')}-{digest(folder)}"


def folder_of(nodeid: str) -> str | None:
    return next((folder for folder in SOURCES if nodeid.startswith(folder)), None)


class Unchanged:
    """A plugin: skips what has not changed, and marks what passed."""

    def __init__(self) -> None:
        self._passed, self._failed = set[str](), set[str]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = {folder for folder in SOURCES if mark(folder).exists()}
        skip = pytest.mark.skip(reason="nothing that it tests has changed since it passed: make test-all runs it")
        for item in items:
            if folder_of(item.nodeid) in done and not item.nodeid.startswith(KEPT):
                item.add_marker(skip)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        if folder is not None and report.failed:
            self._failed.add(folder)
        elif folder is not None and report.when == "call" and report.passed and not report.nodeid.startswith(KEPT):
            self._passed.add(folder)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail
        if hasattr(session.config, "workerinput") or not whole:
            return
        for folder in self._passed - self._failed:
            file = mark(folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            for older in file.parent.glob(f"{file.name.rpartition('-')[0]}-*"):
                older.unlink(missing_ok=True)
            file.touch()
