"""Runs a LaunchPlan on this host: starts its processes, supervises and restarts them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed import failure
from lockstep.distributed.failure import (
    Failure,
    Report,
    Result,
    ended_by_the_kernel,
    find_cause,
    stop_file,
    worth_retrying,
)
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, LaunchError, LockstepError, RankStalled
from lockstep.launchers.local import fork_server, limits
from lockstep.launchers.plan import LaunchPlan
from lockstep.record import timeline as timelines
from lockstep.record.timeline import Timeline
from lockstep.runs.report import leave_report
from lockstep.terminal import tell

if TYPE_CHECKING:
    from lockstep.distributed.store.client import Client
    from lockstep.distributed.watch.stall import Limits, Stall, Watcher
    from lockstep.launchers.local.ranks import Ended, Ranks

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5
# How long ranks that have not made a step get to leave by themselves, once they are asked to.
_EARLY_SECONDS = 10.0
# How long ranks get to write their stacks before they are ended.
_DUMP_SECONDS = 0.5
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
    with timelines.opened(folder, _warn) as timeline:
        timeline.note("start", world_size=len(plan.processes))
        supervisor = _Supervisor(plan, entry, argument, grace, watch, timeline)
        try:
            result = supervisor.run(max_restarts, folder)
        except LockstepError as error:  # no process could be started
            timeline.note("end", status="failed", note=str(error))
            timeline.close()
            if folder is not None:
                leave_report(folder, _warn)
            raise
        timeline.ended(result, len(plan.processes))
        return result


@dataclass
class _Supervisor:
    plan: LaunchPlan
    entry: Callable[..., Any] | None
    argument: Any
    grace: float
    watch: Limits | None
    timeline: Timeline

    def run(self, max_restarts: int, folder: Path | None) -> Result:
        from lockstep.distributed.store.private import store_prefix

        count = len(self.plan.processes)
        self.signals = Signals(save_on_request=True)
        with self.signals.listening(), _store(self.plan.port) as (port, store):
            for attempt in range(max_restarts + 1):
                heartbeats, kills = store.under(store_prefix(attempt)), limits.kills_for_memory()
                result = self._attempt(self.plan.at(port, attempt, str(store.unix_path)), heartbeats)
                if result.failure is not None and limits.kills_for_memory() > kills:
                    result = replace(result, failure=ended_by_the_kernel(result.failure))
                failure = result.failure
                if failure is None or self.signals.count or attempt == max_restarts or not worth_retrying(failure):
                    return result
                saved = _saved_and_not_restored(heartbeats, folder)
                if saved is not None:
                    _warn(
                        f"not restarted: main does not call run.restore(), so a restart would begin at step 0 and not "
                        f"use {saved}. Call run.restore() after run.setup, and start the run again"
                    )
                    return result
                self.timeline.failed("restart", failure, count, attempt=attempt + 1)
                tell(
                    f"lockstep: {failure.render(count)}\n"
                    f"lockstep: restarting from the newest checkpoint (restart {attempt + 1} of {max_restarts})"
                )
        raise AssertionError("an attempt returns or is followed by another")

    def _attempt(self, plan: LaunchPlan, heartbeats: Any) -> Result:
        from lockstep.distributed.watch.stall import Watcher
        from lockstep.launchers.local.ranks import start

        count = len(plan.processes)
        with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
            error_files = [Path(folder) / f"error-{rank}.json" for rank in range(count)]
            try:
                ranks = start(plan, self.entry, self.argument, error_files)
            except OSError as error:
                raise LaunchError(cannot_start(count, error)) from None
            try:
                watcher = None
                if self.watch is not None:
                    watcher = Watcher(heartbeats, range(count), self.watch, ranks.suspended)
                return self._wait(ranks, error_files, watcher)
            finally:
                ranks.close(signal.SIGKILL)
                say_who_was_late(error_files)

    def _wait(self, ranks: Ranks, error_files: list[Path], watcher: Watcher | None) -> Result:
        signals = self.signals
        asked, began, deadline = 0, math.inf, math.inf
        next_look = time.monotonic()
        while True:
            ended = ranks.poll()
            if ended is not None and ended.without_server is not None:
                cause = ended.without_server
                return Result(5, failure=Failure(0, socket.gethostname(), cause, 5, concerns_all_ranks=True))
            if ended is not None and ended.exit_codes:
                # Not only once it was passed on: a signal to the whole group reaches ranks by itself.
                return _failed(error_files, ended.exit_codes, stopping=signals.count > 0)
            if ended is not None:
                return _returned(ended)
            if signals.count > asked:
                asked, began = signals.count, time.monotonic()
                deadline = began + self.grace
                if asked > 1:
                    done = ranks.done()
                    return Result(INTERRUPTED_EXIT_CODE) if done is None else _returned(done)
                doing = "finishing the step, saving and leaving" if ranks.done() is None else "done, and leaving"
                tell(f"lockstep: {signals.name}: {doing}; {signals.how_to_end} to end at once")
                self.timeline.note("preempt", note=signals.name)
                ranks.ask_to_stop()
                stop_file(error_files[0]).touch()  # for a rank that is only now being made and did not hear it
            if signals.save:
                signals.save = False
                ranks.ask_to_save()
            if watcher is not None and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                stall = self._look(watcher, ranks, error_files)
                if stall is not None:
                    self.timeline.note("stall", rank=stall.ranks[0], note=stall.message)
                    return _end_stalled(ranks, stall, error_files, self.timeline.folder)
                if asked and not watcher.begun and time.monotonic() > began + _EARLY_SECONDS and ranks.done() is None:
                    # Still compiling, connecting or fetching, in code that no signal reaches; no step has been made.
                    return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
            if time.monotonic() > deadline:
                if (done := ranks.done()) is not None:
                    return _returned(done)
                cause = f"was asked to stop and did not within {self.grace:g} s (timeouts.stop), so it was ended"
                return Result(5, failure=Failure(0, socket.gethostname(), cause, 5))
            time.sleep(_POLL_SECONDS)

    def _look(self, watcher: Watcher, ranks: Ranks, error_files: list[Path]) -> Stall | None:
        """Reads the heartbeats; returns a stall that ends the attempt."""
        stall = watcher.look()
        if stall is None and (slow := watcher.warning()) is not None:
            if not slow.waited_for and any(reports(error_files)):
                stall = slow  # a rank has failed and cannot leave
            else:
                tell(f"lockstep: {slow.message}")
            if slow.waited_for and watcher.begun:
                ranks.ask_to_save()
        self.timeline.show(watcher.everyone)
        return stall


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


def _warn(text: str) -> None:
    tell(f"lockstep: {text}")


def cannot_start(count: int, error: OSError) -> str:
    """Returns the message for an error of the system while processes are started."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = {
        errno.EMFILE: f"the limit of open files is {files}; raise it (ulimit -n)",
        errno.EAGAIN: "the limit of processes is reached; raise it (ulimit -u), or end some",
        errno.ENOMEM: "there is not enough memory; use fewer processes",
        errno.ENOSPC: failure.what_is_full(tempfile.gettempdir()),
    }.get(error.errno or 0, "`lockstep doctor` looks for what is wrong")
    return f"{count} process{'' if count == 1 else 'es'} could not be started: {error.strerror or error}; {remedy}"


def _returned(ended: Ended) -> Result:
    returned = {rank: outcome.received(rank, _warn) for rank, outcome in ended.returned.items()}
    return Result(max(outcome.exit_code for outcome in ended.returned.values()), returned)


def say_who_was_late(error_files: list[Path]) -> None:
    from lockstep.launchers.local.child import late_file

    for file in map(late_file, error_files):
        with contextlib.suppress(FileNotFoundError):
            tell(f"lockstep: {file.read_text(encoding='utf-8')}")


def _end_stalled(ranks: Ranks, stall: Stall, error_files: list[Path], folder: Path | None) -> Result:
    """Has every rank write its stacks to its log, and ends all of them."""
    from lockstep.record.loggers import suspect

    ranks.dump_stacks()
    time.sleep(_DUMP_SECONDS)
    ranks.close(signal.SIGKILL)
    if any(not each.consequence for each in reports(error_files)):
        return _failed(error_files, {}, stopping=False)  # a rank failed, and then could not leave
    suspected = suspect(folder, stall.message) if folder is not None else ""
    cause = (
        f"{stall.message}{suspected}. The stacks of all threads are in the ranks' logs; timeouts.stall sets the limit"
    )
    stuck = stall.ranks[0]
    kind, code = RankStalled.__name__, RankStalled.exit_code
    failure = Failure(stuck, socket.gethostname(), cause, code, kind, concerns_all_ranks=True)
    return Result(code, failure=failure)


def _failed(error_files: list[Path], exit_codes: dict[int, int], stopping: bool) -> Result:
    failure = find_cause(reports(error_files), exit_codes, socket.gethostname())
    if stopping and exit_codes.get(failure.rank) in (-signal.SIGTERM, INTERRUPTED_EXIT_CODE):
        return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)  # asked to stop before its first step
    return Result(failure.exit_code, failure=failure)


def reports(error_files: list[Path]) -> list[Report]:
    """Returns the failures that ranks wrote down."""
    found = []
    for file in error_files:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found.append(Report(**json.loads(file.read_text(encoding="utf-8"))))
    return found


@contextlib.contextmanager
def _store(port: int | None) -> Iterator[tuple[int, Client]]:
    """Serves the private store of the ranks, for all attempts; yields MASTER_PORT and a connection to the store."""
    from lockstep.distributed.store.client import connect_unix
    from lockstep.distributed.store.private import SOCKET, fresh_folder
    from lockstep.distributed.store.server import Server, listen_on_unix

    with fresh_folder() as folder:
        with _loopback_port(port) as listener:
            number = listener.getsockname()[1]
        path = str(folder / SOCKET)
        server = Server(listen_on_unix(path))
        try:
            yield number, connect_unix(path, _ANSWER_SECONDS)
        finally:
            server.close()


def _loopback_port(port: int | None) -> socket.socket:
    """Binds a socket to loopback, to see that the port is free."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port or 0))
    except OSError as error:
        listener.close()
        if port is None:
            raise LaunchError(f"no port can be opened on 127.0.0.1: {error}") from None
        if error.errno == errno.EACCES:
            raise LaunchError(
                f"launch.port: port {port} is one of those that only root may listen at. Leave launch.port out and a "
                "free one is picked, or name one from 1024 on"
            ) from None
        raise LaunchError(
            f"launch.port: port {port} is already in use on this host. Leave launch.port out and a free one is picked, "
            "or name another"
        ) from None
    return listener
