"""Three hosts and more, and a laptop that reaches them by SSH: made once for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from host_network import Network, why_not

if TYPE_CHECKING:
    from conftest import Finished

# The first leads; the last is a stranger.
NAMES = ("anna", "bert", "carl", "dora")


@dataclass
class Laptop:
    """Where commands are given: a host of its own, which trains nothing."""

    network: Network
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        folders = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        return {**os.environ, **folders, "OMP_NUM_THREADS": "1"}

    def config(self, name: str = "tiny", hosts: tuple[str, ...] = NAMES[:3], **values: Any) -> Path:
        """Of the small task, whose file lies beside it: the folder travels."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).parent / "tasks.py", folder / "tasks.py")
        base: dict[str, Any] = {
            "name": name,
            "task": {"type": "tasks.py:Tiny", "dropout": 0.2, "sleep": 0.02},
            "runtime": "cpu",
            "processes": 4,
            "train": {"epochs": 6, "batch_size": 12},
            "optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "data": {"split": {"train": 0.8, "val": 0.2}},
            "checkpoint": {"every": "4 steps"},
            "log": {"every": "1 step"},
            "launch": {"type": "ssh", "hosts": list(hosts), "threads": 1},
            "pod": {"python": sys.executable, "directory": str(self.network.disk)},
        }
        merged = {**base, **values, "launch": {**base["launch"], **values.get("launch", {})}}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(merged), encoding="utf-8")
        return path

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        argv = self.network.client.enter(
            sys.executable, "-P", "-m", "lockstep", *map(str, arguments), folder=self.folder
        )
        return subprocess.Popen(argv, cwd=self.folder, env=self.env, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def run(self, *arguments: str | Path, limit: float = 120.0) -> Finished:
        from conftest import Finished

        started = self.start(*arguments)
        try:
            out, _ = started.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            started.kill()
            out, _ = started.communicate()
            pytest.fail(f"{arguments} took more than {limit} s\n{out}")
        return Finished(started.returncode, out, "")

    def runs(self, host: str, pod: str) -> list[Path]:
        """The folders of runs on a host's own disk."""
        return sorted((self.network.hosts[host].disk / pod / "runs").glob("*"))


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("hosts"))
    try:
        network.add(*NAMES)
        yield network
    finally:
        network.close()


@pytest.fixture
def laptop(hosts: Network, tmp_path: Path) -> Laptop:
    hosts.restore()
    hosts.client  # noqa: B018  made where it is first asked for
    hosts.write_ssh_config()
    return Laptop(hosts, tmp_path)


@pytest.fixture(scope="session")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by four processes of this machine."""
    from conftest import TASK_FILE, Project

    project = Project(tmp_path_factory.mktemp("one-machine"))
    values = {
        "task": {"type": f"{TASK_FILE}:Tiny", "dropout": 0.2, "sleep": 0.02},
        "processes": 4,
        "train": {"epochs": 6, "batch_size": 12},
        "checkpoint": {"every": "4 steps"},
        "launch": {"threads": 1},
    }
    return project.train(**values)
