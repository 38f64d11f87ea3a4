"""One rank from start to end: all wiring is here.

`python -m lockstep.worker FOLDER` trains the config of a run's folder as the rank that the environment names.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep import runtime
from lockstep.config.objects import import_object, source_of
from lockstep.config.plain import finite
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.activity import LEFT, Activity
from lockstep.distributed.rendezvous import meet
from lockstep.distributed.rollcall.call import hold
from lockstep.distributed.rollcall.report import Evidence, comparable, source_files
from lockstep.distributed.topology import Topology
from lockstep.distributed.watch.heartbeat import Heartbeat
from lockstep.distributed.watch.stacks import dumping_stacks
from lockstep.distributed.watch.stall import Limits
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests, exit_is_failure
from lockstep.engine.summary import announce, conclude, conclude_loop, concluded_if_interrupted, timeline_of
from lockstep.errors import PREEMPTED_EXIT_CODE
from lockstep.mirror.mark import mirrored, uploaded
from lockstep.record import display, run_folder
from lockstep.record.folder_lock import locked_for
from lockstep.record.logs import file_only, rank_log
from lockstep.record.run_folder import brought_here
from lockstep.runs.report import leave_report
from lockstep.runtime.base import Runtime
from lockstep.runtime.deterministic import arithmetic, explained
from lockstep.tasks.evaluate import evaluate
from lockstep.tasks.export import export
from lockstep.tasks.predict import predict
from lockstep.tasks.trainer import fit

logger = logging.getLogger("lockstep.worker")  # also where this module is run as __main__

Prepare = Callable[[Path], None]  # what rank 0 does in the run's folder before anybody trains


def train(
    config: RunConfig,
    topology: Topology,
    make_folder: Callable[[], Path],
    ended: Callable[[dict[str, Any]], None] = lambda outcome: None,
    prepare: Prepare = lambda folder: None,
    opened: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Trains a config as one rank. Returns the exit code of an orderly end. On every rank, `opened` is called with the
    run's folder, and `ended` with the summary that rank 0 wrote."""
    with exit_is_failure(), Rank(config, topology) as rank:
        rank.join(lambda: import_object(source_of(config.task), "task"))
        run = rank.open(make_folder, True, prepare, held=topology.watched)
        opened(run.folder)
        try:
            with concluded_if_interrupted(run):
                outcome = carry_out(run, config)
        except Preempted as preempted:
            ended(_summary(run, {"status": "preempted", "reason": preempted.reason}))
            saved = f"saved at step {run.progress.step} and leaving" if config.after is None else "leaving"
            logger.info("%s: %s", saved, preempted.reason)
            return PREEMPTED_EXIT_CODE
        run._engine.finish(outcome["status"])
        ended(_summary(run, outcome))
    return 0


def carry_out(run: Run, config: RunConfig) -> dict[str, Any]:
    """Trains, evaluates or predicts, as the config asks. Returns `status`, `metrics` and the rest of the outcome."""
    if config.after is None:
        return fit(run, config)
    return {"evaluate": evaluate, "predict": predict, "export": export}[config.after.do](run, config, config.after)


def _summary(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """Returns what rank 0 writes of an orderly end, on every rank: another host may not see the folder."""
    return {**run.agree(lambda: finite(conclude(run, outcome)), "how the run ended"), "folder": run.folder}


def call(
    main: Callable[..., Any],
    settings: RunSettings,
    topology: Topology,
    make_folder: Callable[[], Path],
    prepare: Prepare = lambda folder: None,
) -> Any:
    """Calls a custom loop as one rank. Returns what it returned."""
    # Ranks that share a terminal would write over each other; the only one of a host has its terminal to itself.
    redirect = topology.local_world_size > 1
    together = exit_is_failure() if topology.world_size > 1 else contextlib.nullcontext()
    with together, Rank(settings, topology) as rank:
        rank.join(lambda: main)
        run = rank.open(make_folder, redirect, prepare, held=topology.watched)
        # A custom loop need not use anything of the run: until it does, nothing says whether it makes progress.
        rank.group.activity.enter("main", limit=math.inf)
        try:
            with concluded_if_interrupted(run):
                returned = main(run)
        except Preempted as preempted:
            conclude_loop(run, {"status": "preempted", "reason": preempted.reason})
            raise
        status = "stopped early" if run.stopped else "completed"
        run._engine.finish(status)
        conclude_loop(run, {"status": status, "reason": run.stopped})
        return returned


class Rank:
    """One rank from start to end: `join` meets the others, `open` makes the run, `close` ends it.

    As a context manager it listens to signals, and leaves the group and ends what was begun, however the block ends.
    """

    def __init__(self, settings: RunSettings, topology: Topology, requests: StopRequests | None = None) -> None:
        self.settings, self.topology, self.requests = settings, topology, requests or StopRequests()
        self.run: Run | None = None
        self._joined, self._opened = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> Rank:
        alone = self.topology.world_size == 1
        self._joined.enter_context(self.requests.listening(self.topology.launched_by_us, alone))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._joined:
            if self.run is not None:
                self._opened.push(self._leave_or_abandon)  # first: nobody waits for what this rank still has to write
            self.close(error)

    def join(
        self,
        load_source: Callable[[], Any],
        device_index: int | None = None,
        adapt: Callable[[Runtime], None] = lambda device: None,
    ) -> None:
        """Chooses the device (of the local rank, if a cluster engine has not), holds the roll call, joins the group and
        sends heartbeats. `adapt` is called with the device once the store is there, before the roll call."""
        settings, topology = self.settings, self.topology
        # The settings that ranks compare are those that the run was given: a host may have fewer processes.
        here = settings.model_copy(update={"processes": topology.local_world_size})
        family, _ = runtime.resolve(here)
        self._joined.enter_context(arithmetic(settings, family))
        index = topology.place.local_rank if device_index is None else device_index
        self.runtime = runtime.create(family, index, topology.local_world_size, here)
        self.runtime.prepare()
        activity = Activity(settings.timeouts.first_step)
        self.topology, store, for_beats = meet(topology, settings.timeouts.rendezvous)
        adapt(self.runtime)
        self.heartbeat = Heartbeat(for_beats, topology, activity, Limits.of(settings.timeouts, family))
        self.heartbeat.reports_resident_memory = family == "cpu"
        self.heartbeat.start()
        self._joined.callback(self.heartbeat.stop)
        self.source = source_files(load_source())
        evidence = Evidence(comparable(settings.plain()), self.source.digests)
        began = time.monotonic()
        # The reports of everybody on rank 0; on other ranks, their own.
        self.reports, self.group = hold(topology, self.runtime, store, settings, evidence, activity)
        self.roll_call_seconds = time.monotonic() - began

    def open(
        self,
        make_folder: Callable[[], Path],
        redirect: bool,
        prepare: Prepare = lambda folder: None,
        held: bool = False,
        restarted: bool = False,
    ) -> Run:
        """Agrees on the run's folder, opens its log and makes the run. Rank 0 holds the folder, unless the launcher
        does (`held`), and calls `prepare` with it. Where the run may have been `restarted`, ranks of the attempt before
        get half a minute to let go of it."""
        guards, mirrors = list[Callable[[], None]](), list[Any]()

        def hold_folder() -> str:
            folder = make_folder().resolve()
            lock = locked_for(folder, self.topology, held, restarted)
            guards.append(self._opened.enter_context(lock).check)
            if not held:
                mirrors.append(self._opened.enter_context(mirrored(folder, self.settings, logger.warning)))
            prepare(folder)
            return str(folder)

        folder = Path(self.group.agree(hold_folder, "the run's folder"))
        timeline = self._opened.enter_context(
            timeline_of(self.topology, self.heartbeat, self.roll_call_seconds, folder, held, leave_report)
        )
        console = display.terminal() if self.group.rank == 0 else None
        screen = display.create(console)
        log = self._opened.enter_context(rank_log(folder / "logs", self.group.rank, console, redirect))
        self.heartbeat.stacks = self._opened.enter_context(dumping_stacks(log))
        announce(folder, self.topology, self.runtime.device, self.reports, self.roll_call_seconds, self.source)
        if self.group.rank == 0:
            run_folder.has_begun(folder)
        guard = guards[0] if guards else lambda: None
        engine = Engine(
            self.topology, self.runtime, self.group, self.settings, folder, screen, self.requests, guard, timeline
        )
        self._opened.callback(screen.close)
        self._opened.callback(engine.end_workers)
        self._opened.push(self._end_run)
        if mirrors and mirrors[0] is not None:
            engine.checkpointer.elsewhere = uploaded(mirrors[0], self.settings.timeouts.stop, self.group.activity)
        if engine.out_of_band is not None:
            self.heartbeat.on_beat = engine.out_of_band.look
        self.heartbeat.ask_to_save = self.requests.ask_to_save
        self.run = Run(engine)
        return self.run

    def close(self, error: BaseException | None = None) -> None:
        """Ends what `open` has begun; `error` is what ended the run, if anything. Raises what the error means."""
        self._opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def leave(self) -> None:
        """Leaves the group: the last thing that ranks do together."""
        self.group.activity.enter("leaving", waits=True)
        self.group.leave()
        self.group.activity.enter(LEFT, waits=True)

    def stop(self) -> None:
        """Stops the heartbeat, where the rank is not used as a context manager."""
        self._joined.close()

    def _leave_or_abandon(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Preempted):
            self.leave()
        else:
            self.group.leave_alone()

    def _end_run(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Gives up a run that failed. Raises what the error means where it came while the rank waited for others."""
        if self.run is None or not isinstance(error, (Exception, KeyboardInterrupt)):
            return  # KeyboardInterrupt comes in a notebook, which lives on
        file_only.error("rank %d failed", self.group.rank, exc_info=error)
        meant = explained(error) or self.group.meaning(error)
        self.run._engine.give_up()
        if meant is not error:
            raise meant from error


def main(folder: str) -> int:
    path, topology = Path(folder), Topology.from_env(os.environ)
    if topology.host_count > 1:
        brought_here(path, topology)
    return train(run_folder.read_config(path), topology, lambda: path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
