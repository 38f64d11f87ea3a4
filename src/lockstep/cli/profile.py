"""`lockstep profile`: to look at traces, and to take one of a run that is training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from lockstep.cli.help import Group, examples
from lockstep.cli.messages import say
from lockstep.cli.options import complete_run_dir


@click.group(cls=Group)
def profile() -> None:
    """Look at traces of a run."""


@profile.command(epilog=examples("lockstep profile view runs/digits-20260101-120000"))
@click.argument("run_dir", type=click.Path(path_type=Path), shell_complete=complete_run_dir)
@click.option("--host", default="127.0.0.1", help="Where TensorBoard listens (default: this machine alone).")
@click.option("--port", type=click.IntRange(0, 65535), default=6006, help="Its port; 0 picks a free one.")
def view(run_dir: Path, host: str, port: int) -> None:
    """Open the traces of the run in RUN_DIR in TensorBoard."""
    from lockstep.profiler import view

    traces, command = view.prepare(run_dir, host, port)
    say(f"{len(traces)} trace{'s' if len(traces) > 1 else ''}; choose PROFILE, then Trace Viewer under Tools")
    for trace in traces:
        say(f"  {trace}")
    sys.stdout.flush()
    os.execv(command[0], command)  # so that Ctrl-C is TensorBoard's


@profile.command(
    epilog=examples("lockstep profile capture --seconds 2", "lockstep profile capture 127.0.0.1:9012 127.0.0.1:9013")
)
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@click.option("--seconds", type=click.FloatRange(min=0.01, max=30), default=1.0, help="How long the trace is to be.")
def capture(addresses: tuple[str, ...], seconds: float) -> None:
    """Take a trace of ranks that are training with a profile section, at 127.0.0.1:9012 where no ADDRESS is given."""
    from lockstep.errors import ConfigError
    from lockstep.profiler.demand import capture

    failures = capture(addresses or ("127.0.0.1:9012",), seconds)
    if failures:
        raise ConfigError("\n".join(f"{address}: no profile was taken: {why}" for address, why in failures.items()))
    say("written into profile/proc_N of the run's folder; look at it with: lockstep profile view RUN_DIR")
