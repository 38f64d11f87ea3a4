"""What the user is told of a run that is over: how it ended, where it is, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lockstep.cli.messages import say
from lockstep.errors import PREEMPTED_EXIT_CODE

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result


def conclude(folder: Path, result: Result, config: RunConfig) -> NoReturn:
    """Tell it, and leave with the run's exit code."""
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
    _tell(folder, result, config)
    sys.exit(result.exit_code)


def _tell(folder: Path, result: Result, config: RunConfig) -> None:
    from lockstep.record.run_folder import read_summary, record

    if result.failure is not None:
        failure = result.failure
        record(folder, "failed", failure.cause)
        say(failure.render(int(config.processes)))
        log = folder / "logs" / f"rank-{failure.rank}.log"
        if log.exists():  # a rank has one from the roll call on
            say(f"log: {log}")
        if any((folder / "checkpoints").glob("step-*")):
            say(f"go on from the last checkpoint with: lockstep resume {folder}")
        return
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"saved and stopped; go on with: lockstep resume {folder}")
        return
    if result.exit_code:
        say(f"ended at once; go on from the last checkpoint with: lockstep resume {folder}")
        return
    say(_outcome(read_summary(folder)))
    say(f"run folder: {folder}")
    limit = "steps" if config.train.steps is not None else "epochs"
    say(f"train further:  lockstep resume {folder} --set train.{limit}=N")
    say(f"look at it:     tensorboard --logdir {folder}") if (folder / "tensorboard").is_dir() else None
    say(f"its profile:    lockstep profile view {folder}") if (folder / "profile").is_dir() else None


def _outcome(summary: Mapping[str, Any]) -> str:
    """Of what rank 0 wrote down a moment ago; whatever is not there by now, or not what it was, is left out."""
    told = [f"epoch {summary.get('epoch', '?')}, step {summary.get('step', '?')}"]
    if isinstance(seconds := summary.get("seconds"), (int, float)):
        told[0] += f" in {seconds:.1f} s"
    metrics = summary.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, (int, float)):
            told.append(f"{name} {value:.4g}")
    return f"{summary.get('status', 'ended')}: {'  '.join(told)}"
