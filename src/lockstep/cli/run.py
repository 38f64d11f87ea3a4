"""`lockstep run`: any script, with the variables that torchrun sets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from lockstep.cli.common import DRY_RUN, examples, say
from lockstep.errors import ConfigError
from lockstep.shown import visible


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "lockstep run --processes 2 script.py --epochs 3",
        "lockstep run --processes 2 -m package.module --epochs 3",
    ),
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=None, help="Processes on this host (default: one per GPU, or 1)."
)
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port to meet at (default: a free one).")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Restarts after a failure.")
@click.option("--fresh", is_flag=True, help="Start new interpreters instead of forking a server that has torch loaded.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@DRY_RUN
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    processes: int | None, port: int | None, max_restarts: int, fresh: bool, is_module: bool, dry_run: bool,
    script: str, args: tuple[str, ...],
) -> None:  # fmt: skip
    """Start SCRIPT with the variables that torchrun sets, so that a DDP script runs unchanged."""
    from lockstep import runtime
    from lockstep.config.schema import RunSettings
    from lockstep.launchers.local import supervisor
    from lockstep.launchers.plan import local_plan

    command = _module(script) if is_module else _file(script)
    count = processes or runtime.resolve(RunSettings())[1]
    plan = local_plan([sys.executable, *command, *args], count, port=port)
    if dry_run:
        click.echo(visible(plan.render()))
        return
    result = supervisor.launch(plan, max_restarts=max_restarts, fresh=fresh)
    if result.failure is not None:
        say(result.failure.render(count))
    sys.exit(result.exit_code)


def _file(script: str) -> list[str]:
    if not Path(script).is_file():
        hint = f"; a module is started with: lockstep run -m {script}" if _exists(script) else ""
        raise ConfigError(f"{script}: there is no such script{hint}")
    return [script]


def _module(name: str) -> list[str]:
    if not _exists(name):
        raise ConfigError(f"-m {name}: there is no module {name.split('.')[0]!r} here or on Python's path")
    return ["-m", name]


def _exists(module: str) -> bool:
    """Whether the module, or the package it is in, can be found without importing it."""
    top = module.split(".")[0]
    if not top.isidentifier():
        return False
    return Path(top).is_dir() or Path(f"{top}.py").is_file() or importlib.util.find_spec(top) is not None
