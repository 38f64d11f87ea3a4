"""What rank 0 writes of a run's beginning and end: topology.json, the timeline, summary.json."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.distributed.rollcall.report import SHOWN, Report, Source, table
from lockstep.distributed.topology import Topology
from lockstep.distributed.watch.heartbeat import Heartbeat
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Interrupted, Preempted
from lockstep.record import run_folder
from lockstep.record import timeline as timelines
from lockstep.record.logs import file_only
from lockstep.record.run_folder import keep_code
from lockstep.record.timeline import Timeline
from lockstep.record.writers import write_json

logger = logging.getLogger(__name__)

_LOGGERS_SECONDS = 2.0  # for loggers of a run that was asked to end before its first step


def conclude(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """Writes summary.json on rank 0. Returns what it says."""
    if not run.is_main:
        return {}
    engine, progress = run._engine, run.progress
    engine.require_folder()
    best = outcome.get("best")
    seconds, compilations = engine.control_sync.elapsed(), dict(engine.guard.compilations)
    summary = {
        "status": outcome["status"],
        "reason": outcome.get("reason"),
        "epoch": progress.epochs_done,
        "step": progress.step,
        "world_size": run.world_size,
        "runtime": engine.runtime.name,
        "strategy": engine.strategy.name,
        "metrics": outcome.get("metrics", {}),
        "best": best and {**best, "mode": engine.settings.checkpoint.keep.mode},
        "seconds": round(seconds, 3),
        "samples_per_second": round(progress.examples / seconds, 1) if seconds > 0 else None,
        **({"compilations": compilations} if compilations else {}),
    }
    write_json(run.folder / run_folder.SUMMARY_FILE, summary)
    return summary


@contextlib.contextmanager
def concluded_if_interrupted(run: Run) -> Iterator[None]:
    """Writes the summary of a run that was asked to end before its first step."""
    try:
        yield
    except Interrupted as interrupted:
        run._engine.aggregator.close("interrupted", _LOGGERS_SECONDS)
        if not run_folder.has_ended_before(run_folder.read_summary(run.folder)):
            conclude(run, {"status": "interrupted", "reason": interrupted.reason})
        raise


def conclude_loop(run: Run, outcome: dict[str, Any]) -> None:
    """Writes the summary of a custom loop. A start without a step leaves it as it is where the loop only evaluated,
    and else keeps its numbers."""
    engine = run._engine
    before = run_folder.read_summary(run.folder) if run.is_main else {}
    if not run_folder.has_ended_before(before) or run.progress.step > engine.began_at:
        best = engine.checkpointer.best() if run.is_main else None
        conclude(run, {"metrics": engine.aggregator.latest, "best": best, **outcome})
    elif engine.feed.was_asked:  # the last step was made before, and now the program has ended
        conclude(run, {"metrics": before.get("metrics", {}), "best": before.get("best"), **outcome})


def announce(
    folder: Path, topology: Topology, device: Any, reports: list[Report], seconds: float, source: Source
) -> None:
    """Writes down and logs who takes part."""
    logger.info("on %s, %s, pid %d", topology.place.host, device, os.getpid())
    if topology.place.rank != 0:
        return
    keep_code(folder, source.root, source.digests, logger.warning)
    found = {"world_size": topology.world_size, "roll_call_seconds": round(seconds, 3)}
    write_json(folder / run_folder.TOPOLOGY_FILE, {**found, "ranks": [asdict(each) for each in reports]})
    if topology.world_size > 1:
        logger.info("roll call: all %d ranks are here, in %.2f s", topology.world_size, seconds)
        more = [f"  and {len(reports) - SHOWN} more in {run_folder.TOPOLOGY_FILE}"] if len(reports) > SHOWN else []
        devices = {each.physical_device for each in reports}
        says_something = topology.host_count > 1 or len(devices) < len(reports)
        for line in (*table(reports[:SHOWN]), *more):
            (logger if says_something else file_only).info(line)


@contextlib.contextmanager
def timeline_of(
    topology: Topology,
    heartbeat: Heartbeat,
    seconds: float,
    folder: Path,
    held: bool,
    leave_report: Callable[[Path, Callable[[str], object]], object],
) -> Iterator[Timeline | None]:
    """Opens rank 0's timeline. Where no launcher holds the folder, it also has what a launcher would have noted;
    and where none watches, where all ranks are."""
    if topology.place.rank != 0:
        yield None
        return
    with timelines.opened(folder, logger.warning) as timeline:
        now = time.time()
        if not held:
            timeline.note("start", now - seconds, world_size=topology.world_size)
        timeline.note("roll call", now - seconds, now, world_size=topology.world_size)
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
