"""Runs a LaunchPlan on this host: serves the store of its processes, starts them, supervises and restarts them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed.failure import Result, ended_by_the_kernel
from lockstep.distributed.signals import Signals
from lockstep.errors import LaunchError, LockstepError
from lockstep.launchers.local import fork_server, limits
from lockstep.launchers.plan import LaunchPlan
from lockstep.launchers.supervisor import run_attempts, supervise
from lockstep.record import timeline as timelines
from lockstep.record.timeline import Timeline
from lockstep.runs.report import leave_report
from lockstep.terminal import say

if TYPE_CHECKING:
    from lockstep.distributed.store.client import Client
    from lockstep.distributed.watch.stall import Limits

# How long the store may take to answer the launcher that serves it.
_ANSWER_SECONDS = 60.0


def launch(
    plan: LaunchPlan,
    *,
    entry: Callable[..., Any] | None = None,
    argument: Any = None,
    max_restarts: int = 0,
    grace: float = 60.0,
    watch: Limits | None = None,
    folder: Path | None = None,
) -> Result:
    """Starts all processes of a plan, waits for them, and restarts them where that is allowed and makes sense.

    With `watch`, the processes are our ranks, which send heartbeats and are ended where they make no progress. `folder`
    is that of their run, for its timeline.
    """
    fork_server.warm_up(plan.threads)
    with timelines.opened(folder, say) as timeline:
        timeline.note("start", world_size=len(plan.processes))
        try:
            result = _run(plan, entry, argument, max_restarts, grace, watch, timeline)
        except LockstepError as error:  # no process could be started
            timeline.note("end", status="failed", note=str(error))
            timeline.close()
            if folder is not None:
                leave_report(folder, say)
            raise
        timeline.ended(result, len(plan.processes))
        return result


def _run(
    plan: LaunchPlan,
    entry: Callable[..., Any] | None,
    argument: Any,
    max_restarts: int,
    grace: float,
    watch: Limits | None,
    timeline: Timeline,
) -> Result:
    from lockstep.distributed.store.private import store_prefix
    from lockstep.distributed.watch.stall import Watcher
    from lockstep.launchers.local.ranks import start

    count, signals = len(plan.processes), Signals(save_on_request=True)
    with signals.listening(), _store(plan.port) as (port, store):

        def attempt(number: int) -> Result:
            kills = limits.kills_for_memory()
            with start(plan.at(port, number, str(store.unix_path)), entry, argument) as ranks:
                watcher = None
                if watch is not None:
                    watcher = Watcher(store.under(store_prefix(number)), range(count), watch, ranks.suspended)
                result = supervise(ranks, watcher, signals, grace, timeline)
            if result.failure is not None and limits.kills_for_memory() > kills:
                return replace(result, failure=ended_by_the_kernel(result.failure))
            return result

        def can_restart(number: int) -> bool:
            saved = _saved_and_not_restored(store.under(store_prefix(number)), timeline.folder)
            if saved is not None:
                say(
                    f"not restarted: main does not call run.restore(), so a restart would begin at step 0 and not "
                    f"use {saved}. Call run.restore() after run.setup, and start the run again"
                )
            return saved is None

        return run_attempts(attempt, max_restarts, signals, timeline, count, can_restart)


def _saved_and_not_restored(heartbeats: Any, folder: Path | None) -> str | None:
    """Returns the newest checkpoint where rank 0 trained without run.restore: another attempt would not use it."""
    from lockstep.checkpoint.storage import CheckpointStorage
    from lockstep.distributed.activity import Beat, beat_key

    beat = Beat.decode(heartbeats.read(beat_key(0)))
    if folder is None or beat is None or beat.restores or not beat.begun:
        return None
    storage = CheckpointStorage(folder / "checkpoints")
    steps = storage.steps()
    return storage.path(steps[-1]).name if steps else None


@contextlib.contextmanager
def _store(port: int | None) -> Iterator[tuple[int, Client]]:
    """Serves the private store of the ranks, for all attempts; yields MASTER_PORT and a connection to the store."""
    from lockstep.distributed.store.client import connect_unix
    from lockstep.distributed.store.private import SOCKET, fresh_folder
    from lockstep.distributed.store.server import Server, listen_on_unix

    with fresh_folder() as folder:
        number = _free_port(port)
        path = str(folder / SOCKET)
        server = Server(listen_on_unix(path))
        try:
            yield number, connect_unix(path, _ANSWER_SECONDS)
        finally:
            server.close()


def _free_port(port: int | None) -> int:
    """Binds a socket to loopback, to see that the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port or 0))
            return int(listener.getsockname()[1])
        except OSError as error:
            if port is None:
                raise LaunchError(f"no port can be opened on 127.0.0.1: {error}") from None
            why = "is already in use on this host"
            if error.errno == errno.EACCES:
                why = "is one of those that only root may listen at"
            raise LaunchError(
                f"launch.port: port {port} {why}. Leave launch.port out and a free one is picked, or name another "
                "from 1024 on"
            ) from None
