"""One process from start to end: all wiring is here.

`python -m lockstep.worker FOLDER` trains the config of a run's folder as the rank that the environment says.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import runtime
from lockstep.config.objects import import_object
from lockstep.config.plain import finite
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.activity import LEFT, Activity
from lockstep.distributed.group import Group
from lockstep.distributed.rendezvous import meet
from lockstep.distributed.rollcall.call import hold
from lockstep.distributed.rollcall.report import SHOWN, Evidence, Report, Source, comparable, source_files, table
from lockstep.distributed.topology import Topology
from lockstep.distributed.watch.heartbeat import Heartbeat, user_line
from lockstep.distributed.watch.stacks import dumping_stacks
from lockstep.distributed.watch.stall import Limits
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Interrupted, Preempted, StopRequests
from lockstep.errors import PREEMPTED_EXIT_CODE, RankLeft
from lockstep.mirror.mark import mirrored
from lockstep.record import display, folder_lock, run_folder
from lockstep.record import timeline as chronicles
from lockstep.record.code import keep_code
from lockstep.record.folder_lock import Held
from lockstep.record.logs import file_only, rank_log
from lockstep.record.run_folder import brought_here
from lockstep.record.timeline import Timeline
from lockstep.record.writers import write_json
from lockstep.runs.report import leave_report
from lockstep.runtime.base import Runtime
from lockstep.tasks.work import carry_out

if TYPE_CHECKING:
    from lockstep.mirror.mirror import Mirror

logger = logging.getLogger("lockstep.worker")  # also where this module is run as __main__

Prepare = Callable[[Path], None]  # what rank 0 does in the run's folder before anybody trains
Guard = Callable[[], None]  # raises where the run's folder is not the run's any more

# How long rank 0 waits for the folder: where it may have been restarted, and elsewhere.
RESTART_PATIENCE, _PATIENCE = 30.0, 3.0
_LOGGERS_SECONDS = 2.0  # for loggers of a run that was asked to end before its first step


def train(
    config: RunConfig,
    topology: Topology,
    make_folder: Callable[[], Path],
    ended: Callable[[dict[str, Any]], None] = lambda outcome: None,
    prepare: Prepare = lambda folder: None,
    opened: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Train as one rank; the exit code of an orderly end. `opened` is told the run's folder, on every rank.

    `ended` is told what rank 0 wrote down of it, with the run's folder, on every rank: another host may not see either.
    """

    def load_task() -> Any:
        return import_object(config.task.type, "task")

    with _work_is_done(), joined(config, topology, make_folder, load_task, redirect=True, prepare=prepare) as run:
        opened(run.folder)
        try:
            outcome = carry_out(run, config)
        except Preempted as preempted:
            ended(_told(run, {"status": "preempted", "reason": preempted.reason}))
            saved = f"saved at step {run.progress.step} and leaving" if config.after is None else "leaving"
            logger.info("%s: %s", saved, preempted.reason)
            return PREEMPTED_EXIT_CODE
        except Interrupted as interrupted:
            _conclude_interrupted(run, interrupted)
            raise
        run.finish(outcome["status"])
        ended(_told(run, outcome))
    return 0


def _told(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 writes down of an orderly end, on every rank."""
    return {**run.agree(lambda: finite(conclude(run, outcome)), "how the run ended"), "folder": run.folder}


def call(
    main: Callable[..., Any],
    settings: RunSettings,
    topology: Topology,
    make_folder: Callable[[], Path],
    prepare: Prepare = lambda folder: None,
) -> Any:
    """Call the user's own loop as one rank; what it returned."""
    # Ranks that share a terminal would talk at once; the only one of a host has a terminal of its own.
    together = _work_is_done() if topology.world_size > 1 else contextlib.nullcontext()  # one alone ends as it likes
    redirect = topology.local_world_size > 1
    with together, joined(settings, topology, make_folder, lambda: main, redirect, prepare) as run:
        # A loop of one's own need not use anything of the run: until it does, nothing says whether it gets on.
        activity = run.group.activity
        activity.enter("main", limit=math.inf)
        try:
            returned = main(run)
        except Preempted as preempted:
            _conclude_own(run, {"status": "preempted", "reason": preempted.reason})
            raise
        except Interrupted as interrupted:
            _conclude_interrupted(run, interrupted)
            raise
        status = "stopped early" if run.stopped else "completed"
        run.finish(status)
        _conclude_own(run, {"status": status, "reason": run.stopped})
        return returned


@contextlib.contextmanager
def _work_is_done() -> Iterator[None]:
    """A rank that the user's code ends in the midst of the work is one that failed: the others would wait for it."""
    try:
        yield
    except (Preempted, Interrupted):
        raise
    except SystemExit as leaving:
        entry = leaving.__traceback__
        while entry is not None and entry.tb_next is not None:
            entry = entry.tb_next
        where = user_line(entry.tb_frame) if entry is not None else "?"
        code = "" if leaving.code is None else repr(leaving.code)
        raise RankLeft(
            f"sys.exit({code}) was called at {where}, before the work was done: the other ranks would wait for this "
            "one. Return from the function instead; run.stop(reason) ends training on all ranks"
        ) from None


def _conclude_interrupted(run: Run, interrupted: Interrupted) -> None:
    run.aggregator.close("interrupted", _LOGGERS_SECONDS)
    if not run_folder.has_ended_before(run_folder.read_summary(run.folder)):
        conclude(run, {"status": "interrupted", "reason": interrupted.reason})


def _conclude_own(run: Run, outcome: dict[str, Any]) -> None:
    """What a start without a step leaves of the summary: all of it where it only evaluated, else the numbers."""
    before = run_folder.read_summary(run.folder) if run.is_main else {}
    if not run_folder.has_ended_before(before) or run.progress.step > run.began_at:
        found = run.checkpointer.best() if run.is_main else None
        conclude(run, {"metrics": run.aggregator.latest, "best": found, **outcome})
    elif run.was_asked_for_batches:  # the last step was made before, and now the program came to its end
        conclude(run, {"metrics": before.get("metrics", {}), "best": before.get("best"), **outcome})


@contextlib.contextmanager
def joined(
    settings: RunSettings,
    topology: Topology,
    make_folder: Callable[[], Path],
    load_source: Callable[[], Any],
    redirect: bool,
    prepare: Prepare = lambda folder: None,
) -> Iterator[Run]:
    """The run of this rank: device chosen, roll called, group joined, folder agreed, log open, signals heard."""
    requests = StopRequests()
    with (
        requests.listening(topology.launched_by_us, alone=topology.world_size == 1),
        met(settings, topology, load_source) as present,
        # A launcher that watches its ranks is one that knows the run, and holds its folder.
        opened(
            present,
            settings,
            make_folder,
            requests,
            redirect,
            prepare=prepare,
            held=topology.watched,
            patience=_patience(topology),
        ) as run,
    ):
        try:
            yield run
        except Preempted:
            present.leave()
            raise
        except BaseException:
            present.group.leave_alone()
            raise
        present.leave()


@dataclass(frozen=True)
class Outlet:
    """Where rank 0's words and numbers go, where that is not the terminal of its own process."""

    screen: display.Display
    log: logging.Handler


@dataclass(frozen=True)
class Present:
    """A rank that has met the others: what the roll call found, and the group that it belongs to now."""

    topology: Topology
    runtime: Runtime
    group: Group
    reports: list[Report]  # of everybody on rank 0; on the others, their own
    seconds: float  # how long the roll call took
    heartbeat: Heartbeat
    source: Source

    def leave(self) -> None:
        activity = self.group.activity
        activity.enter("leaving", waits=True)
        self.group.leave()
        activity.enter(LEFT, waits=True)


@contextlib.contextmanager
def met(
    settings: RunSettings,
    topology: Topology,
    load_source: Callable[[], Any],
    device_index: int | None = None,
    adapt: Callable[[Runtime], None] = lambda device: None,
) -> Iterator[Present]:
    """Device chosen, roll called, group joined; the heart beats while the block runs.

    The device is that of the local rank, where a cluster engine has not chosen one; `adapt` is called with it once the
    store is there, before the roll call. Leaving is up to the caller: a rank that failed does not take apart what
    others may wait in.
    """
    # What the host has is its own affair; the settings that ranks compare are those that the run was given.
    here = settings.model_copy(update={"processes": topology.local_world_size})
    family, _ = runtime.resolve(here)
    index = topology.place.local_rank if device_index is None else device_index
    device = runtime.create(family, index, topology.local_world_size, here)
    device.prepare()
    activity = Activity(settings.timeouts.first_step)
    store, for_beats = meet(topology, settings.timeouts.rendezvous)
    adapt(device)
    heart = Heartbeat(for_beats, topology, activity, Limits.of(settings.timeouts, family))
    heart.reports_resident_memory = family == "cpu"
    with _beating(heart) as heartbeat:
        config = comparable(settings.plain())
        source = source_files(load_source())
        evidence = Evidence(config, source.digests)
        began = time.monotonic()
        reports, group = hold(topology, device, store, settings, evidence, activity)
        yield Present(topology, device, group, reports, time.monotonic() - began, heartbeat, source)


@contextlib.contextmanager
def opened(
    present: Present,
    settings: RunSettings,
    make_folder: Callable[[], Path],
    requests: StopRequests,
    redirect: bool,
    outlet: Outlet | None = None,
    prepare: Prepare = lambda folder: None,
    held: bool = False,
    patience: float = RESTART_PATIENCE,
) -> Iterator[Run]:
    """The run of a rank that has met the others: folder agreed and held, log open.

    `prepare` is called by rank 0 once it holds the folder; `held` says that the launcher holds it already. Where ranks
    may have been started anew, what is left of those before gets so many seconds to be gone.
    """
    with contextlib.ExitStack() as holding:
        guards: list[Guard] = []
        mirrors: list[Mirror | None] = []  # by whoever holds the folder

        def hold_folder() -> str:
            folder = make_folder().resolve()
            guards.append(holding.enter_context(_held(folder, present.topology, held, patience)).check)
            if not held:
                mirrors.append(holding.enter_context(mirrored(folder, settings, logger.warning)))
            prepare(folder)
            return str(folder)

        folder = Path(present.group.agree(hold_folder, "the run's folder"))
        guard = guards[0] if guards else lambda: None
        with (
            _timeline(present, folder, held) as timeline,
            _opened(present, settings, folder, requests, redirect, outlet, guard, timeline) as run,
        ):
            if mirrors and mirrors[0] is not None:
                run.checkpointer.elsewhere = _waiting_for(mirrors[0], settings, present.group.activity)
            yield run


def _waiting_for(mirror: Mirror, settings: RunSettings, activity: Activity) -> Callable[[bool], None]:
    """What makes rank 0 wait until a save is in the bucket, by a name and with a limit."""

    def wait(leaving: bool) -> None:
        limit = settings.timeouts.stop
        with activity.within(f"the upload to {mirror.url}", limit=limit + activity.patience):
            mirror.settle(limit if leaving else None)

    return wait


def _patience(topology: Topology) -> float:
    if topology.watched or topology.attempt:
        return RESTART_PATIENCE
    return _PATIENCE if topology.world_size > 1 else 0.0  # other launchers start ranks anew without saying so


def _held(folder: Path, topology: Topology, held: bool, patience: float) -> contextlib.AbstractContextManager[Held]:
    """By rank 0."""
    if held:
        return folder_lock.locked_by_rank(folder, patience)
    return folder_lock.locked(folder, "rank 0" if topology.world_size > 1 else "its only process", patience)


@contextlib.contextmanager
def _timeline(present: Present, folder: Path, held: bool) -> Iterator[Timeline | None]:
    """On rank 0, what it leaves for whoever looks at the run. Where no launcher holds the folder, also what one would
    have noted; and where none watches, where all ranks are."""
    topology, heartbeat = present.topology, present.heartbeat
    if topology.place.rank != 0:
        yield None
        return
    with chronicles.opened(folder, logger.warning) as timeline:
        now = time.time()
        if not held:
            timeline.note("start", now - present.seconds, world_size=topology.world_size)
        timeline.note("roll call", now - present.seconds, now, world_size=topology.world_size)
        if not topology.watched:
            heartbeat.show = timeline.show
        status: str | None = None
        note: str | None = None
        try:
            yield timeline
            status = run_folder.read_summary(folder).get("status")
        except (Preempted, Interrupted) as asked:
            status, note = "preempted" if isinstance(asked, Preempted) else "interrupted", asked.reason
            raise
        except BaseException as error:
            status, note = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            heartbeat.show = None
            if not held:
                timeline.note("end", status=status, note=note)
                timeline.close()
                leave_report(folder, logger.warning)


@contextlib.contextmanager
def _opened(
    present: Present,
    settings: RunSettings,
    folder: Path,
    requests: StopRequests,
    redirect: bool,
    outlet: Outlet | None,
    guard: Guard,
    timeline: Timeline | None,
) -> Iterator[Run]:
    group, topology = present.group, present.topology
    rank, console = group.rank, display.terminal() if group.rank == 0 else None
    screen = outlet.screen if outlet else display.create(console)
    opened_log = rank_log(folder / "logs", rank, console, redirect, outlet.log if outlet else None)
    with opened_log as log, dumping_stacks(log) as present.heartbeat.stacks:
        _announce(present, folder)
        if rank == 0:
            run_folder.has_begun(folder)
        run = Run(topology, present.runtime, group, settings, folder, screen, requests, guard, timeline)
        if run.out_of_band is not None:
            present.heartbeat.on_beat = run.out_of_band.look
        present.heartbeat.ask_to_save = requests.ask_to_save
        try:
            yield run
        except (Exception, KeyboardInterrupt) as error:  # the latter in a notebook, which lives on
            file_only.error("rank %d failed", rank, exc_info=True)
            meant = _meant(error, group)
            run.give_up()
            if meant is error:
                raise
            raise meant from error
        finally:
            run.end_workers()
            screen.close()


def _meant(error: BaseException, group: Group) -> BaseException:
    """What an error means that came in the midst of the user's code, while the rank waited for others: where a model is
    spread over ranks, they meet in its forward pass."""
    at = group.activity.now
    if not isinstance(error, RuntimeError):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    doing, waits = group.activity.locate(frames[::-1]) or (at.doing, at.waits)
    return group.explain(error, f"{doing} of step {at.step}") if waits else error


@contextlib.contextmanager
def _beating(heartbeat: Heartbeat) -> Iterator[Heartbeat]:
    """Let others know where this rank is, from the first moment on that there is a place to leave word."""
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


def _announce(present: Present, folder: Path) -> None:
    """Write down, and say, who takes part."""
    topology, reports, seconds = present.topology, present.reports, present.seconds
    logger.info("on %s, %s, pid %d", topology.place.host, present.runtime.device, os.getpid())
    if topology.place.rank != 0:
        return
    keep_code(folder, present.source.root, present.source.digests, logger.warning)
    found = {"world_size": topology.world_size, "roll_call_seconds": round(seconds, 3)}
    write_json(folder / run_folder.TOPOLOGY_FILE, {**found, "ranks": [asdict(each) for each in reports]})
    if topology.world_size > 1:
        logger.info("roll call: all %d ranks are here, in %.2f s", topology.world_size, seconds)
        more = [f"  and {len(reports) - SHOWN} more in {run_folder.TOPOLOGY_FILE}"] if len(reports) > SHOWN else []
        devices = {each.physical_device for each in reports}
        says_something = topology.host_count > 1 or len(devices) < len(reports)
        for line in (*table(reports[:SHOWN]), *more):
            (logger if says_something else file_only).info(line)


def conclude(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """summary.json, by rank 0, and what it says."""
    if not run.is_main:
        return {}
    run.require_folder()
    seconds = run.elapsed()
    summary = {
        "status": outcome["status"],
        "reason": outcome.get("reason"),
        "epoch": run.progress.epochs_done,
        "step": run.progress.step,
        "world_size": run.world_size,
        "runtime": run.runtime.name,
        "strategy": run.strategy,
        "metrics": outcome.get("metrics", {}),
        "best": outcome.get("best"),
        "seconds": round(seconds, 3),
        "samples_per_second": round(run.progress.examples / seconds, 1) if seconds > 0 else None,
        **({"compilations": run.compilations} if run.compilations else {}),
    }
    write_json(run.folder / run_folder.SUMMARY_FILE, summary)
    return summary


def main(folder: str) -> int:
    path, topology = Path(folder), Topology.from_env(os.environ)
    if topology.host_count > 1:
        brought_here(path, topology)
    return train(run_folder.read_config(path), topology, lambda: path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
