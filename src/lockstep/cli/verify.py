"""`lockstep verify`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from lockstep.cli.help import examples
from lockstep.cli.messages import say, say_whose_code
from lockstep.cli.options import SET
from lockstep.shown import visible


@click.command(
    epilog=examples(
        "lockstep verify config.yaml",
        "lockstep verify config.yaml --only 'cpu-*' --steps 3 --json",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=2), default=5, help="Steps to train on each (default: 5).")
@SET
@click.option("--only", multiple=True, metavar="NAME", help="Compare only these; cpu-* means all that begin so.")
@click.option("--require", multiple=True, metavar="NAME", help="Fail where one of these is not here.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=None, help="Largest relative difference allowed.")
@click.option("--limit", type=click.FloatRange(min=1), default=300.0, help="Seconds that any one run may take.")
@click.option("--no-resume", is_flag=True, help="Leave out going on from each other's checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Keep the runs in this new folder.")
@click.option("--json", "form", flag_value="json", help="Print a JSON object.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table in Markdown.")
def verify(
    config: Path,
    steps: int,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    require: tuple[str, ...],
    tolerance: float | None,
    limit: float,
    no_resume: bool,
    out: Path | None,
    form: str | None,
) -> None:
    """Train CONFIG for a few steps in every way that works here, and say whether all give the same losses."""
    from lockstep.distributed.topology import launched
    from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError
    from lockstep.verify import report
    from lockstep.verify.examine import examine, work_folder
    from lockstep.verify.findings import Asked

    if launched(os.environ):
        raise ConfigError("lockstep verify starts all processes itself: run it by itself, not under a launcher")
    say_whose_code(config)
    asked = Asked(config, steps, overrides, only, require, tolerance, limit, not no_resume)
    try:
        with work_folder(out) as place:
            found = examine(asked, place.path, say)
            place.keep = place.keep or not found.agrees
    except KeyboardInterrupt:
        say("asked to stop: the run under way was ended")
        sys.exit(INTERRUPTED_EXIT_CODE)
    shown = {"json": report.as_json, "markdown": report.markdown}.get(form or "", report.text)(found)
    click.echo(visible(shown))
    if form != "json":
        click.echo(f"\n{report.conclusion(found)}")
    if place.keep:
        say(f"the runs are in {place.path}")
    sys.exit(0 if found.agrees else 1)
