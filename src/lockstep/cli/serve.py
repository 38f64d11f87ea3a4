"""`lockstep serve`: the pages of runs in a browser, following those that are at work."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from lockstep.cli.help import examples
from lockstep.cli.messages import say
from lockstep.errors import ConfigError


@click.command(epilog=examples("lockstep serve", "lockstep serve experiments --port 8000"))
@click.argument("runs", type=click.Path(path_type=Path), default="runs")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="0 is any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; off loopback, with a token.")
def serve(runs: Path, port: int, host: str) -> None:
    """Show all runs in the folder RUNS in a browser, until Ctrl-C."""
    from lockstep.runs.folder import RunsFolder
    from lockstep.runs.server import Server

    if not runs.is_dir():
        raise ConfigError(f"RUNS {runs}: there is no such folder")
    with Server(RunsFolder(runs), host, port) as server:
        if server.token is not None:
            say(f"--host {host}: not for this machine alone. Whoever has the token in the address sees the runs; it "
                "travels in the clear: use a network that is yours, or SSH to a port on loopback")  # fmt: skip
        say(f"{len(server.runs.names())} runs of {runs} at the address below; Ctrl-C ends it")
        click.echo(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
