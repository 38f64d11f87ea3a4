"""What runs on every Ray worker of `lockstep train`: a rank, from the driver's order to its last word."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import worker
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, RankStalled
from lockstep.failure import report
from lockstep.ray import session
from lockstep.ray.relay import Relay, RelayedDisplay, RelayedLog, printing_through
from lockstep.ray.reports import Reports
from lockstep.topology import Place
from lockstep.train.stop import Preempted


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker, beside the config, which the backend has."""

    folder: str  # the run's folder, on storage that all nodes have
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
    desk: Any
    threads: int
    here: str | None  # the driver's working directory, where workers share its machine


def main(orders: dict[str, Order]) -> None:
    """Train as one rank; what follows the last step, and the last word to the driver, are the session's to do."""
    order, current = orders["order"], session.current()
    place, config = current.present.topology.place, current.settings
    relay = Relay(order.desk, place.rank, current.requests)
    if not relay.may_begin():
        return
    relaying = contextlib.ExitStack()
    relaying.enter_context(relay.running())
    if place.rank == 0:
        relaying.enter_context(printing_through(relay))
    current.ended = lambda error: _ended(error, place, relay, relaying)
    current.outlet = worker.Outlet(RelayedDisplay(relay), RelayedLog(relay))
    current.make_reporter = Reports
    current.present.heartbeat.tell = lambda message: relay.failed(report(RankStalled(message), place.rank, place.host))
    relay.send("started", host=place.host)
    _settle(order, place)
    assert isinstance(config, RunConfig)
    session.fit(config)


def _settle(order: Order, place: Place) -> None:
    if not (Path(order.folder) / order.mark).exists():
        raise ConfigError(
            f"rank {place.rank} on {place.host}: {order.folder} is not the run's folder there. Nodes with disks of "
            "their own need a folder that all of them share: name it in launch.ray.storage"
        )
    if order.here is not None:
        os.chdir(order.here)
    torch.set_num_threads(order.threads)


def _ended(error: BaseException | None, place: Place, relay: Relay, relaying: contextlib.ExitStack) -> None:
    with relaying, contextlib.suppress(Exception):  # the driver may be what is gone
        if error is None or isinstance(error, Preempted):
            relay.send("ended", exit_code=error.code if error else 0)
        else:
            relay.failed(report(error, place.rank, place.host))
