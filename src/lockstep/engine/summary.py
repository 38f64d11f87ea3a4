"""summary.json: how a run ended, written by rank 0."""

from __future__ import annotations

from typing import Any

from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Interrupted
from lockstep.record import run_folder
from lockstep.record.writers import write_json

_LOGGERS_SECONDS = 2.0  # for loggers of a run that was asked to end before its first step


def conclude(run: Run, outcome: dict[str, Any]) -> dict[str, Any]:
    """Writes summary.json on rank 0. Returns what it says."""
    if not run.is_main:
        return {}
    engine, progress = run._engine, run.progress
    engine.require_folder()
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
        "best": outcome.get("best"),
        "seconds": round(seconds, 3),
        "samples_per_second": round(progress.examples / seconds, 1) if seconds > 0 else None,
        **({"compilations": compilations} if compilations else {}),
    }
    write_json(run.folder / run_folder.SUMMARY_FILE, summary)
    return summary


def conclude_interrupted(run: Run, interrupted: Interrupted) -> None:
    run._engine.aggregator.close("interrupted", _LOGGERS_SECONDS)
    if not run_folder.has_ended_before(run_folder.read_summary(run.folder)):
        conclude(run, {"status": "interrupted", "reason": interrupted.reason})


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
