"""What the user is told of a run that is over: how it ended, where it is, and what to do next."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from lockstep.cli.messages import say
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, BucketBehind
from lockstep.launchers import checks

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.mirror.mirror import Mirror
    from lockstep.mirror.url import Url

# What the upload gets where the user had the run ended at once.
_AT_ONCE_SECONDS = 5.0


def conclude(folder: Path, result: Result, config: RunConfig, mirror: Mirror | None = None) -> NoReturn:
    """Tell it, and leave with the run's exit code; `mirror` is what keeps the folder in a bucket."""
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
    from lockstep.record.run_folder import note_end
    from lockstep.runs.report import leave_report

    note_end(folder, result)
    leave_report(folder, say)
    behind = _uploaded(result, config, mirror) if mirror is not None else None
    code = _tell(folder, result, config, folder if mirror is None or behind else mirror.url)
    if behind is not None:
        say(behind)
        code = BucketBehind.exit_code if code in (0, PREEMPTED_EXIT_CODE) else code
    sys.exit(code)


@contextlib.contextmanager
def saved_before(folder: Path) -> Iterator[None]:
    """A process that was asked to stop before its first step lost nothing where there is a checkpoint."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED_EXIT_CODE and any((folder / "checkpoints").glob("step-*")):
            raise SystemExit(PREEMPTED_EXIT_CODE) from None
        raise


def _uploaded(result: Result, config: RunConfig, mirror: Mirror) -> str | None:
    """Wait for the rest to be in the bucket; what to tell where it did not get there.

    Signals that ask to stop ask for what is being done; Ctrl-C ends it.
    """
    from lockstep.distributed.signals import handled, nothing

    limit = config.timeouts.checkpoint if result.exit_code == 0 else config.timeouts.stop
    if result.exit_code == INTERRUPTED_EXIT_CODE and not result.nothing_to_save:
        limit = min(limit, _AT_ONCE_SECONDS)
    with handled(dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1), nothing)):
        return mirror.finish(limit)


def _tell(folder: Path, result: Result, config: RunConfig, where: Path | Url) -> int:
    """The exit code: that of the run, and 75 only where there is a checkpoint to go on from, `where`."""
    from lockstep.runs.closing import closing_lines

    saved = any((folder / "checkpoints").glob("step-*"))

    if result.failure is not None:
        failure = result.failure
        say(failure.render(int(config.processes)))
        log = folder / "logs" / f"rank-{failure.rank}.log"
        if log.exists():  # a rank has one from the roll call on
            say(f"log: {log}")
        checks.explain_out_of_memory(failure, config, folder, say)
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
    _tell_profile(folder)
    return 0


def _tell_profile(folder: Path) -> None:
    """Where the time of the profiled steps went, and what has all of it."""
    if not (folder / "profile").is_dir():
        return
    from lockstep.profiler import shares

    say(f"its profile:    lockstep profile view {folder}")
    for line in shares.table(folder / "profile"):
        say(line)
