"""Places workers and asks each for its device, through the backend that a training run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.train import RunConfig
from ray.train.torch import TorchTrainer

from lockstep.config.schema import RayCluster
from lockstep.distributed.rollcall.report import Report
from lockstep.errors import LaunchError
from lockstep.ray import placement
from lockstep.ray.backend import TorchConfig
from lockstep.ray.cluster import connected
from lockstep.ray.failures import cause_of
from lockstep.ray.session import current


def verify(
    workers: int,
    backend: str,
    settings: RayCluster,
    resources: Mapping[str, float],
    join_timeout: float,
    storage: str,
    **config: Any,
) -> list[str]:
    """Returns a line per worker and the verdict; raises what the roll call found. `config` is of TorchConfig."""
    with connected(settings, workers, resources, {}):
        _check_capacity(workers, resources)
        board = ray.remote(num_cpus=0)(_Board).remote()
        trainer = TorchTrainer(
            _write_reports,
            train_loop_config={"board": board},
            scaling_config=placement.scaling(
                workers, resources, topology=settings.topology, accelerator=settings.accelerator
            ),
            torch_config=TorchConfig(backend=backend, join_timeout_s=join_timeout, **config),
            run_config=RunConfig(name="verification", storage_path=storage),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise cause_of(error) from None
        reports: list[Report] = ray.get(board.read.remote(), timeout=join_timeout)
    devices = len({each.physical_device for each in reports})
    lines = [
        f"worker rank {each.rank}: node {each.host}, device {each.device}, physical device {each.physical_device}, ok"
        for each in reports
    ]
    verdict = f"{len(reports)} workers on {devices} devices, none shared, and a sum over all of them is right"
    return [*lines, f"verdict: OK, {verdict}"]


def _check_capacity(workers: int, resources: Mapping[str, float]) -> None:
    """Refuses at once more workers than the cluster could ever place."""
    total = ray.cluster_resources()
    for name, each in resources.items():
        if each * workers > total.get(name, 0.0):
            raise LaunchError(
                f"{workers} workers with {each:g} {name} each need {each * workers:g} {name}, but the cluster has "
                f"{total.get(name, 0.0):g} in all and {ray.available_resources().get(name, 0.0):g} free: fewer "
                "workers, or more nodes"
            )


class _Board:
    """Where rank 0 writes for the driver to read."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def write(self, reports: list[Report]) -> None:
        self._reports = reports

    def read(self) -> list[Report]:
        return self._reports


def _write_reports(config: dict[str, Any]) -> None:
    present = current().present
    if present.group.rank == 0:
        ray.get(config["board"].write.remote(present.reports), timeout=60)
