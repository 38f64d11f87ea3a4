"""Real Ray for tests: one cluster per session, to which a test may add nodes (raylets with resources of their own)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Nothing leaves this machine, nothing waits for ever, and a worker is polled often.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent / "ray"), os.environ.get("PYTHONPATH")])),
}
# Read when Ray is imported: else lines that differ in nothing but numbers are one.
os.environ.setdefault("RAY_DEDUP_LOGS", SETTINGS["RAY_DEDUP_LOGS"])
# What a join may take on a machine that is busy with starting other workers.
JOIN_SECONDS = 60.0
_LEAVE_SECONDS = 15.0
SMALL = {"num_cpus": 4, "object_store_memory": 100_000_000}


class Nodes:
    """A cluster of raylets on this machine, with this process as a driver. Workers that ask for a resource are placed
    on the nodes that have it."""

    def __init__(self) -> None:
        import ray
        from ray._private.utils import get_ray_address_file
        from ray.cluster_utils import Cluster

        self._before = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(SETTINGS)
        # Here Ray notes the newest cluster, for whoever calls ray.init(). Only Cluster.shutdown would take it back.
        self._noted = Path(get_ray_address_file(None))
        self._known = self._noted.read_text() if self._noted.exists() else None
        self.cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        ray.init(address=self.cluster.address, log_to_driver=True)
        self._leaving = threading.Thread(target=ray.shutdown, name="leaving-ray", daemon=True)

    def add(self, **resources: float) -> Any:
        return self.cluster.add_node(**SMALL, resources=resources)

    def leave(self) -> bool:
        """Disconnects this process; whether that worked.

        ray.shutdown was seen to wait for ever for the thread that prints the workers' logs, with a lock that
        Cluster.shutdown wants as well. So it has a limit, and nodes are ended one by one.
        """
        if self._leaving.ident is None:
            self._leaving.start()
        self._leaving.join(_LEAVE_SECONDS)
        return not self._leaving.is_alive()

    def end(self) -> None:
        """Ends the cluster; a driver that is still connected is then ended by Ray, and this process with it."""
        for node in [*self.cluster.worker_nodes, self.cluster.head_node]:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        self._noted.unlink(missing_ok=True)
        if self._known is not None:
            self._noted.write_text(self._known)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_running: list[Nodes] = []


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """The driver is connected to the head."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")
    _running.append(Nodes())
    yield _running[0]
    if _running:
        _running[0].leave()
        _running.pop().end()


def end_after_the_last_test() -> None:
    """Ends the cluster before other tests run: with its threads in this process, one of them once stood still."""
    if _running and _running[0].leave():
        _running.pop().end()


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the workers of tests/ray/ray_bodies.py wrote down, by rank."""
    files = sorted(folder.glob("rank-*.jsonl"))
    return {int(file.stem[5:]): [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def shown(capfd: pytest.CaptureFixture[str], awaited: str, limit: float = 20.0) -> str:
    """What reached the driver's terminal; Ray brings lines there a moment after they were written."""
    printed, deadline = "", time.monotonic() + limit
    while awaited not in printed and time.monotonic() < deadline:
        out, err = capfd.readouterr()
        printed += out + err
        time.sleep(0.2)
    out, err = capfd.readouterr()
    return printed + out + err


Fit = Callable[..., Any]


@pytest.fixture
def fit(nodes: Nodes, tmp_path: Path) -> Fit:
    """Train a function under Ray with our TorchConfig: its Result."""
    return make_fit(tmp_path)


def make_fit(storage: Path) -> Fit:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lockstep.ray import TorchConfig

    def fit(
        function: Callable[..., Any],
        workers: int = 2,
        backend: str = "gloo",
        loop_config: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        max_failures: int = 0,
        name: str = "run",
        trainer: dict[str, Any] | None = None,
        run_config: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        return TorchTrainer(
            function,
            train_loop_config=loop_config,
            scaling_config=ScalingConfig(num_workers=workers, **(scaling or {})),
            torch_config=TorchConfig(backend=backend, **{"join_timeout_s": JOIN_SECONDS, **config}),
            run_config=RunConfig(
                name=name,
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=max_failures),
                **(run_config or {}),
            ),
            **(trainer or {}),
        ).fit()

    return fit
