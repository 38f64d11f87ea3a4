"""Placing workers and asking each for its device, through the same backend that a training run has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import ray.train
from ray.train import RunConfig
from ray.train.torch import TorchTrainer

from lockstep.distributed.rollcall.report import Report
from lockstep.errors import LaunchError
from lockstep.ray import capacity
from lockstep.ray.access import asking_for_tokens, kept_to_loopback, require_authentication
from lockstep.ray.failure import cause_of
from lockstep.ray.placement import LOOPBACK
from lockstep.ray.session import current
from lockstep.ray.torch_config import TorchConfig


def verify(
    workers: int,
    backend: str,
    address: str | None,
    resources: Mapping[str, float],
    join_timeout: float,
    placement_timeout: float,
    storage: str,
    topology: str | None = None,
    accelerator: str | None = None,
    insecure: bool = False,
    **config: Any,
) -> list[str]:
    """A line per worker and the verdict; raises what the roll call found to be wrong. `config` is of TorchConfig."""
    with _connected(address, workers, resources, placement_timeout, insecure):
        check_capacity(workers, resources)
        board = ray.remote(num_cpus=0)(_Board).remote()
        trainer = TorchTrainer(
            _say_who_is_here,
            train_loop_config={"board": board},
            scaling_config=capacity.scaling(workers, resources, topology=topology, accelerator=accelerator),
            torch_config=TorchConfig(backend=backend, join_timeout_s=join_timeout, **config),
            run_config=RunConfig(name="verification", storage_path=storage),
        )
        try:
            trainer.fit()
        except Exception as error:
            cause = cause_of(error)
            raise cause from None
        reports: list[Report] = ray.get(board.read.remote(), timeout=join_timeout)
    return [*map(line, reports), verdict(reports)]


def line(report: Report) -> str:
    return (
        f"worker rank {report.rank}: node {report.host}, device {report.device}, "
        f"physical device {report.physical_device}, ok"
    )


def verdict(reports: list[Report]) -> str:
    devices = len({report.physical_device for report in reports})
    return f"verdict: OK, {len(reports)} workers on {devices} devices, none shared, and a sum over all of them is right"


def check_capacity(workers: int, resources: Mapping[str, float]) -> None:
    """Refuse more workers than the cluster could ever place, at once and with what it has."""
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


def _say_who_is_here(config: dict[str, Any]) -> None:
    present = current().present
    if present.group.rank == 0:
        ray.get(config["board"].write.remote(present.reports), timeout=60)


@contextlib.contextmanager
def _connected(
    address: str | None, workers: int, resources: Mapping[str, float], placement_timeout: float, insecure: bool
) -> Iterator[None]:
    """Connected to a cluster: one that runs, or a local one with as many CPUs as the workers need."""
    variable = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    os.environ.setdefault(variable, f"{placement_timeout:g}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    already, address = ray.is_initialized(), address or os.environ.get("RAY_ADDRESS")
    if not already:
        local: dict[str, Any] = {}
        if not address:
            local = {"num_cpus": int(workers * resources["CPU"]) + 1, "include_dashboard": False}
            local["_node_ip_address"] = LOOPBACK
        elif address.rpartition(":")[2].isdigit():
            require_authentication(address, insecure)
        try:
            with kept_to_loopback(), contextlib.nullcontext() if address else asking_for_tokens(insecure):
                ray.init(address=address or "local", log_to_driver=False, **local)
        except ConnectionError as error:
            raise LaunchError(f"--address {address}: no Ray cluster answers there: {error}") from None
    try:
        yield
    finally:
        if not already:
            ray.shutdown()
