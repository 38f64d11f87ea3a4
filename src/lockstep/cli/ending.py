"""What the user is told of a run that is over: how it ended, where it is, and what to do next."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lockstep.cli.messages import say
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result


def conclude(folder: Path, result: Result, config: RunConfig) -> NoReturn:
    """Tell it, and leave with the run's exit code."""
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
    sys.exit(_tell(folder, result, config))


@contextlib.contextmanager
def saved_before(folder: Path) -> Iterator[None]:
    """A process that was asked to stop before its first step lost nothing where there is a checkpoint."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED_EXIT_CODE and any((folder / "checkpoints").glob("step-*")):
            raise SystemExit(PREEMPTED_EXIT_CODE) from None
        raise


def _tell(folder: Path, result: Result, config: RunConfig) -> int:
    """The exit code: that of the run, and 75 only where there is a checkpoint to go on from."""
    from lockstep.record.run_folder import read_summary, record

    saved = any((folder / "checkpoints").glob("step-*"))

    if result.failure is not None:
        failure = result.failure
        record(folder, "failed", failure.cause)
        say(failure.render(int(config.processes)))
        log = folder / "logs" / f"rank-{failure.rank}.log"
        if log.exists():  # a rank has one from the roll call on
            say(f"log: {log}")
        if saved:
            say(f"go on from the last checkpoint with: lockstep resume {folder}")
        return result.exit_code
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"saved and stopped; go on with: lockstep resume {folder}")
        return result.exit_code
    if result.nothing_to_save:
        record(folder, "interrupted", "asked to stop before the first step")
        then = "nothing has changed since the last checkpoint" if saved else "there was nothing to save"
        say(f"stopped before the first step: {then}; go on with: lockstep resume {folder}")
        return PREEMPTED_EXIT_CODE if saved else result.exit_code
    if result.exit_code:
        record(folder, "interrupted", "asked to end at once")
        then = "go on from the last checkpoint" if saved else "nothing was saved; start over"
        say(f"ended at once; {then} with: lockstep resume {folder}")
        return result.exit_code
    say(_outcome(read_summary(folder)))
    say(f"run folder: {folder}")
    limit = "steps" if config.train.steps is not None else "epochs"
    say(f"train further:  lockstep resume {folder} --set train.{limit}=N")
    say(f"look at it:     tensorboard --logdir {folder}") if (folder / "tensorboard").is_dir() else None
    say(f"its profile:    lockstep profile view {folder}") if (folder / "profile").is_dir() else None
    return 0


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
