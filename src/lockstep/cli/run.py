"""`lockstep run`: any script, with the variables that torchrun sets."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lockstep.cli.messages import say
from lockstep.cli.options import DRY_RUN


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--processes", type=click.IntRange(min=1), default=None, help="Processes on this host (default: one per GPU, or 1)."
)
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port to meet at (default: a free one).")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Restarts after a failure.")
@click.option("--fresh", is_flag=True, help="Start new interpreters instead of forking a server that has torch loaded.")
@DRY_RUN
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    processes: int | None,
    port: int | None,
    max_restarts: int,
    fresh: bool,
    dry_run: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT with the variables that torchrun sets, so that a DDP script runs unchanged."""
    from lockstep import runtime
    from lockstep.config.schema import RunSettings
    from lockstep.errors import ConfigError
    from lockstep.launcher import local
    from lockstep.launcher.plan import local_plan

    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    count = processes or runtime.resolve(RunSettings())[1]
    plan = local_plan([sys.executable, str(script), *args], count, port=port)
    if dry_run:
        click.echo(plan.render())
        return
    result = local.launch(plan, max_restarts=max_restarts, fresh=fresh)
    if result.failure is not None:
        say(result.failure.render(count))
    sys.exit(result.exit_code)
