"""What runs on every Ray worker of `lockstep train`: a rank, from the driver's order to its last message."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import worker
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import report
from lockstep.distributed.topology import Place, ranks_text
from lockstep.engine.stop_requests import Preempted
from lockstep.errors import ConfigError, RankStalled
from lockstep.ray import session
from lockstep.ray.folder_sync import NodeSync, ask_mailbox
from lockstep.ray.relay import Relay, RelayedDisplay, RelayedLog, printing_through
from lockstep.ray.reporting import BackgroundReporter


@dataclass(frozen=True)
class Order:
    """What the driver asks of every worker, beside the config, which the backend has."""

    folder: str  # the run's folder
    mark: str  # the name of a file in it, by which a worker knows that it sees the same folder
    mailbox: Any
    threads: int
    storage: str | None  # where the user said that all nodes share it
    here: str | None  # the driver's working directory, where workers share its machine


def main(orders: dict[str, Order]) -> None:
    """Train as one rank; what follows the last step, and the last message to the driver, are the session's to do."""
    order, current = orders["order"], session.current()
    place, config = current.present.topology.place, current.settings
    relay = Relay(order.mailbox, place.rank, current.requests)
    if not relay.may_begin():
        return
    relaying, syncing = contextlib.ExitStack(), contextlib.ExitStack()
    folder_sync: NodeSync | None = None
    relaying.enter_context(relay.running())
    if place.rank == 0:
        relaying.enter_context(printing_through(relay))
    current.ended = lambda error: _ended(error, place, relay, relaying, syncing)
    current.outlet = worker.Outlet(RelayedDisplay(relay), RelayedLog(relay))
    current.make_reporter = lambda run: BackgroundReporter(run, folder_sync.push if folder_sync else None)
    current.present.heartbeat.tell = lambda message: relay.failed(report(RankStalled(message), place.rank, place.host))
    current.folder_is_held = True
    relay.send("started", host=place.host)
    if order.here is not None:
        os.chdir(order.here)
    if config.runtime != "xla":  # which has set its own
        torch.set_num_threads(order.threads)
    folder_sync = _folder_sync(order, current)
    if folder_sync is not None:
        syncing.enter_context(folder_sync.running())
    assert isinstance(config, RunConfig)
    session.fit(config)


def _folder_sync(order: Order, current: session.Session) -> NodeSync | None:
    """What makes up for a disk of this node's own; all ranks go on together once every node has what it needs."""
    group, place = current.present.group, current.present.topology.place
    sees = (Path(order.folder) / order.mark).exists()
    blind = [rank for rank, each in enumerate(group.gather(sees, "who sees the run's folder")) if not each]
    if not blind:
        return None
    if order.storage is not None:
        raise ConfigError(
            f"launch.ray.storage: {order.storage} is not the same folder on all nodes: {ranks_text(blind)} cannot see "
            f"the run's folder {order.folder} there (this is rank {place.rank} on {place.host})"
        )
    current.shares_folder = False
    keep = current.settings.checkpoint.keep
    folder_sync = None if sees else NodeSync(ask_mailbox(order.mailbox), Path(order.folder), place, keep)
    if folder_sync is not None:
        folder_sync.pull()
    group.barrier("the run's folder on all nodes")
    return folder_sync


def _ended(
    error: BaseException | None,
    place: Place,
    relay: Relay,
    relaying: contextlib.ExitStack,
    syncing: contextlib.ExitStack,
) -> None:
    try:
        syncing.close()
    except Exception as failed:  # what was not pushed is lost with this node
        error = error or failed
    with relaying, contextlib.suppress(Exception):  # the driver may be what is gone
        if error is None or isinstance(error, Preempted):
            relay.send("ended", exit_code=error.code if error else 0)
        else:
            relay.failed(report(error, place.rank, place.host))
