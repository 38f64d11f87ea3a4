"""`lockstep sweep`: what has come of the trials of a sweep."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from lockstep.cli.messages import say


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ended", nargs=2, type=int, default=None, metavar="TRIAL CODE", help="Note how a trial's job ended.")
def sweep(folder: Path, ended: tuple[int, int] | None) -> None:
    """Show the trials of the sweep in FOLDER, and keep the best config of those that have ended."""
    from lockstep.record import trials

    asked = trials.read_sweep(folder)
    with _alone(folder):
        if ended is not None:
            _note(folder / trials.trial_folder(ended[0]), ended[1])
        found = trials.read_trials(folder, asked.metric)
        code = trials.conclude(found, asked, folder, say)
    open_yet = sum(not each.has_ended for each in found)
    if open_yet:
        say(f"{open_yet} of {len(found)} trials have not ended")
    sys.exit(0 if open_yet else code)


def _note(run: Path, code: int) -> None:
    """A job that failed with nobody left to write it down."""
    from lockstep.record import run_folder

    status = run_folder.read_summary(run).get("status", run_folder.RUNNING)
    if code and status == run_folder.RUNNING:
        run_folder.record(run, "failed", f"the job ended with exit code {code}; its output says more")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Trials that end at once do not overwrite each other's table with an older one, where the disk has locks."""
    try:
        lock = (folder / ".table.lock").open("a")
    except OSError:  # a folder of somebody else, to be looked at
        yield
        return
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
