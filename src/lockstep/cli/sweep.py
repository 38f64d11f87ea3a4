"""`lockstep sweep`: what has come of the trials of a sweep."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.help import examples
from lockstep.cli.messages import say
from lockstep.cli.options import JSON
from lockstep.config.plain import finite


@click.command(epilog=examples("lockstep sweep runs/digits-sweep-20260101-120000"))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ended", nargs=2, type=int, default=None, metavar="TRIAL CODE", help="Note how a trial's job ended.")
@JSON
def sweep(folder: Path, ended: tuple[int, int] | None, as_json: bool) -> None:
    """Show the trials of the sweep in FOLDER, and keep the best config of those that have ended."""
    from lockstep.record import trials

    asked = trials.read_sweep(folder)
    with _alone(folder):
        if ended is not None:
            _note(folder / trials.trial_folder(ended[0]), ended[1])
        found = trials.read_trials(folder, asked.metric)
        code = trials.conclude(found, asked, folder, _nothing if as_json else say)
    open_yet = sum(not each.has_ended for each in found)
    if as_json:
        best = trials.best_of(found, asked)
        click.echo(json.dumps(finite({
            "metric": asked.metric, "mode": asked.mode, "open": open_yet,
            "best": None if best is None else best.number,
            "trials": [{**asdict(each), "folder": str(folder / each.folder)} for each in found],
        }), indent=1))  # fmt: skip
    elif open_yet:
        say(f"{open_yet} of {len(found)} trials have not ended")
    sys.exit(0 if open_yet else code)


def _nothing(text: str) -> None:
    """What is said for people, where a program listens."""


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
