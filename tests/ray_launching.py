"""What tests of `launch: ray` share: a real cluster of several nodes on this machine, and runs on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from ray_cluster import Nodes

if TYPE_CHECKING:
    from conftest import Started

RECORDER = Path(__file__).parent / "ray" / "recorder.py"
LIMIT = 180.0


class Places:
    """Two nodes of the session's cluster with room for two workers each, that tests may end, and what runs there."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._added: list[Any] = []
        self.complete()

    @property
    def address(self) -> str:
        return str(self._nodes.cluster.address)

    def ray(self, **settings: Any) -> dict[str, Any]:
        """Settings of a run whose workers are placed on these nodes."""
        return {"address": self.address, "insecure": True, "resources": {"CPU": 0, "place": 1}, **settings}

    def complete(self) -> None:
        """Replace the nodes that were ended."""
        while len(self._added) < 2:
            self._added.append(self._nodes.add(place=2))

    def kill(self, host: str) -> None:
        """End a node as a power cut does: by the name that the roll call gave it."""
        (node,) = [each for each in self._added if host.endswith(each.node_id[:8])]
        self._added.remove(node)
        self._nodes.cluster.remove_node(node, allow_graceful=False)

    def workers(self) -> list[psutil.Process]:
        """Processes of the cluster that train."""
        return [each for each in psutil.process_iter() if _trains(each)]


def _trains(process: psutil.Process) -> bool:
    try:
        return "ray::RayTrain" in " ".join(process.cmdline()) and any(
            parent.pid == os.getpid() for parent in process.parents()
        )
    except psutil.Error:
        return False


@pytest.fixture
def places(nodes: Nodes) -> Places:
    """Shared by all tests of a session; whole at the beginning of each."""
    found: Places = nodes.__dict__.setdefault("places", None) or Places(nodes)
    nodes.__dict__["places"] = found
    found.complete()
    return found


class OnRay:
    """A folder with a task that records what it is given, and obeys orders to misbehave."""

    def __init__(self, folder: Path) -> None:
        from conftest import Project  # which imports this file

        self.project = Project(folder)
        self.folder, self.orders = folder, folder / "orders"
        self.orders.mkdir()
        shutil.copy(RECORDER, folder / "recorder.py")
        (folder / "neighbour.py").write_text("WORD = 'travelled'\n")

    def config(self, ray: dict[str, Any] | None = None, launch: dict[str, Any] | None = None, **values: Any) -> Path:
        base: dict[str, Any] = {
            "name": "recorded",
            "task": {"type": "recorder.py:Recorder", "orders": str(self.orders)},
            "runtime": "cpu",
            "processes": 2,
            "train": {"epochs": 4, "batch_size": 12},
            "optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "data": {"split": {"train": 0.8, "val": 0.2}},
            "log": {"every": "1 step"},
            "checkpoint": {"every": "5 steps"},
            "launch": {"type": "ray", "threads": 1, **(launch or {}), "ray": ray or {}},
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump({**base, **values}), encoding="utf-8")
        return path

    def start(self, config: Path, *arguments: str) -> Started:
        return self.project.start("train", config, *arguments)

    def run_folder(self) -> Path:
        from conftest import wait_until

        return Path(wait_until(lambda: list(self.folder.glob("runs/*/topology.json")), 150, "the roll call")[0]).parent

    def order(self, what: str, rank: int) -> None:
        """Have a rank misbehave in its next step."""
        (self.orders / f"{what}-{rank}").touch()

    def seen(self) -> list[tuple[int, int, list[int]]]:
        """Process, rank and examples of every step that any rank began, in the order in which they began."""
        lines = (self.orders / "seen").read_text().splitlines()
        return [(int(pid), int(rank), [*map(int, rest)]) for pid, rank, *rest in map(str.split, lines)]


@pytest.fixture
def on_ray(tmp_path: Path) -> OnRay:
    return OnRay(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by the local launcher."""
    on_ray = OnRay(tmp_path_factory.mktemp("undisturbed"))
    finished = on_ray.project.run("train", on_ray.config(name="local", launch={"type": "local"}))
    assert finished.code == 0, finished.text
    return on_ray.project.only_run()


def assert_same_weights(one: Path, other: Path) -> None:
    from conftest import last_weights  # which imports this file

    first, second = last_weights(one), last_weights(other)
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first), "the weights differ"
