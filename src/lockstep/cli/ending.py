"""The end of `lockstep train` and `resume`: what happened, where the run is, and what to do next."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from lockstep.cli.common import say
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, BucketBehind

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.mirror.mirror import Mirror
    from lockstep.mirror.url import Url

# The limit of an upload where the user ended the run at once.
_AT_ONCE_SECONDS = 5.0


def conclude(folder: Path, result: Result, config: RunConfig, mirror: Mirror | None = None) -> NoReturn:
    """Says how the run ended and exits with its code; `mirror` keeps the folder in a bucket."""
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
    from lockstep.record.run_folder import note_end
    from lockstep.runs.report import leave_report

    note_end(folder, result)
    leave_report(folder, say)
    behind = _uploaded(result, config, mirror) if mirror is not None else None
    code = _say_end(folder, result, config, folder if mirror is None or behind else mirror.url)
    if behind is not None:
        say(behind)
        code = BucketBehind.exit_code if code in (0, PREEMPTED_EXIT_CODE) else code
    sys.exit(code)


@contextlib.contextmanager
def saved_before(folder: Path) -> Iterator[None]:
    """Exits as preempted, not interrupted, where a checkpoint exists: a stop before the first step loses nothing."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED_EXIT_CODE and any((folder / "checkpoints").glob("step-*")):
            raise SystemExit(PREEMPTED_EXIT_CODE) from None
        raise


def _uploaded(result: Result, config: RunConfig, mirror: Mirror) -> str | None:
    """Waits for pending uploads and returns an error message if any failed. Only Ctrl-C ends the wait."""
    from lockstep.distributed.signals import handled, nothing

    limit = config.timeouts.checkpoint if result.exit_code == 0 else config.timeouts.stop
    if result.exit_code == INTERRUPTED_EXIT_CODE and not result.nothing_to_save:
        limit = min(limit, _AT_ONCE_SECONDS)
    with handled(dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1), nothing)):
        return mirror.finish(limit)


def _say_end(folder: Path, result: Result, config: RunConfig, where: Path | Url) -> int:
    """Returns the exit code: that of the run, and 75 only where there is a checkpoint to resume from."""
    from lockstep.distributed.failure import how_to_plan
    from lockstep.runs.report import closing_lines

    saved = any((folder / "checkpoints").glob("step-*"))
    if result.failure is not None:
        say(result.failure.render(int(config.processes)))
        log = folder / "logs" / f"rank-{result.failure.rank}.log"
        if log.exists():  # from the roll call on
            say(f"log: {log}")
        if result.failure.memory and config.after is None:
            say(how_to_plan(str(folder / "config.yaml"), int(config.processes)))
        if saved:
            say(f"go on from the last checkpoint with: lockstep resume {where}")
        return result.exit_code
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"saved and stopped; go on with: lockstep resume {where}")
        return result.exit_code
    if result.nothing_to_save:
        then = "nothing has changed since the last checkpoint" if saved else "there was nothing to save"
        say(f"stopped before the first step: {then}; go on with: lockstep resume {where}")
        return PREEMPTED_EXIT_CODE if saved else result.exit_code
    if result.exit_code:
        then = "go on from the last checkpoint" if saved else "nothing was saved; start over"
        say(f"ended at once; {then} with: lockstep resume {where}")
        return result.exit_code
    limit = "steps" if config.train.steps is not None else "epochs"
    for line in closing_lines(folder, where, f"lockstep resume {where} --set train.{limit}=N"):
        say(line)
    return 0
