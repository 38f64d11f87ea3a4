"""What tests of `launch: ray` share: a real cluster of several nodes on this machine, and runs on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from conftest import Project, Started, rank_pids, wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

RECORDER = Path(__file__).parent / "recorder.py"
LIMIT = 180.0


class Nodes:
    """Three raylets with resources of their own: a head for drivers, and two nodes with room for two workers each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add() for _ in range(2)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=2)

    def kill(self, host: str) -> None:
        """End a node as a power cut does: by the name that the roll call gave it."""
        (node,) = [each for each in self.nodes if host.endswith(each.node_id[:8])]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def complete(self) -> None:
        """Replace the nodes that were killed."""
        while len(self.nodes) < 2:
            self.nodes.append(self.add())

    def workers(self) -> list[psutil.Process]:
        """Processes of the cluster that train."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cmdline()[:1] == ["ray::RayTrainWorker"] or "ray::RayTrainWorker" in process.name():
                    found.append(process)
            except psutil.Error:
                continue
        return [each for each in found if self._owns(each)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return any(parent.pid == os.getpid() for parent in process.parents())
        except psutil.Error:
            return False

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    yield cluster
    cluster.shutdown()


class OnRay:
    """A folder with a task that records what it is given, and obeys orders to misbehave."""

    def __init__(self, folder: Path) -> None:
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
        return Path(wait_until(lambda: list(self.folder.glob("runs/*/topology.json")), 90, "the roll call")[0]).parent

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


def weights(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first), "the weights differ"


__all__ = ["LIMIT", "Nodes", "OnRay", "assert_same_weights", "nodes", "on_ray", "rank_pids", "wait_until", "weights"]
