"""`lockstep runs`: the runs of a folder, and what may be removed. Needs no torch."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from lockstep.cli.help import Group, examples
from lockstep.cli.messages import say
from lockstep.cli.options import JSON
from lockstep.config.plain import columns, finite, nearest
from lockstep.errors import ConfigError
from lockstep.shown import in_a_line, size

_COLOURS = {"completed": "green", "stopped early": "green", "running": "cyan", "failed": "red", "lost": "red"}
_SORTS = ("started", "name", "status", "step", "best", "duration")
# What summary.json, or the lack of one, says; with dashes for a shell.
_STATUSES = (
    "running", "completed", "stopped-early", "failed", "lost", "interrupted", "preempted", "pruned", "queued",
)  # fmt: skip

FOLDER = click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
STATUS = click.option("--status", "statuses", multiple=True, type=click.Choice(_STATUSES), help="May be repeated.")
NAME = click.option(
    "--name", "patterns", multiple=True, metavar="PATTERN", help="Part of the name, or a pattern with *."
)


class _Runs(Group):
    """What is none of its commands is the folder to list."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in context.help_option_names):
            args = ["list", *args]
        return super().parse_args(context, args)


@click.group(
    cls=_Runs,
    epilog=examples(
        "lockstep runs",
        "lockstep runs experiments --status failed --sort duration",
        "lockstep runs clean --older-than 7d",
    ),
)
def runs() -> None:
    """List runs, and remove those that are of no use.

    `lockstep runs FOLDER` is short for `lockstep runs list FOLDER`.
    """


@runs.command("list", epilog=examples("lockstep runs list", "lockstep runs list experiments --name digits --sort best"))
@FOLDER
@STATUS
@NAME
@click.option("--sort", type=click.Choice(_SORTS), default="started", help="The newest, best, ... first.")
@click.option("--reverse", is_flag=True, help="The other way round.")
@JSON
def list_(
    folder: Path, statuses: tuple[str, ...], patterns: tuple[str, ...], sort: str, reverse: bool, as_json: bool
) -> None:
    """Show the runs in FOLDER (runs/ where not given): status, step, best value, duration.

    A run is called lost that says nothing any more and never said how it ended, and queued before its job begins.
    """
    from lockstep.runs import table

    _require(folder)
    found = table.ordered(table.matching(table.found(folder), statuses, patterns), sort, reverse)
    if as_json:
        _print_json([each.plain() for each in found])
        return
    if not found:
        say(f"{folder}: there are no runs" + (" that fit" if statuses or patterns else ""))
        return
    head, *lines = columns(cells := table.rows(found))
    click.echo(head)
    before = max(len(row[0]) for row in cells) + 2  # the first column, and what parts it from the status
    for run, line in zip(found, lines, strict=True):
        after = before + len(in_a_line(run.status))
        click.echo(f"{line[:before]}{click.style(line[before:after], fg=_COLOURS.get(run.status))}{line[after:]}")


@runs.command(
    epilog=examples(
        "lockstep runs clean",
        "lockstep runs clean --yes",
        "lockstep runs clean experiments --status completed --older-than 4w --with-checkpoints",
    )
)
@FOLDER
@STATUS
@NAME
@click.option("--older-than", metavar="AGE", default="0s", help="Nothing was written for so long: 12h, 7d, 4w.")
@click.option("--with-checkpoints", is_flag=True, help="Also runs that have checkpoints.")
@click.option("--yes", is_flag=True, help="Remove them; without it they are only listed.")
@JSON
def clean(
    folder: Path,
    statuses: tuple[str, ...],
    patterns: tuple[str, ...],
    older_than: str,
    with_checkpoints: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """List what may be removed from FOLDER (runs/ where not given), and remove it with --yes.

    Runs that failed, were lost or interrupted and have no checkpoint; with --status, those of that status. Never a
    run that is at work or waits in a queue, nor a folder that holds anything no run writes.
    """
    from lockstep.runs import cleaning, table

    _require(folder)
    oldest = cleaning.age(older_than)
    there = [each for each in table.found(folder) if each.folder.parent == folder]  # trials belong to their sweep
    fitting = table.matching(there, (), patterns)
    chosen = cleaning.choose(table.ordered(fitting, "name"), statuses, oldest, with_checkpoints, time.time())
    told, failed = [], 0
    for each in chosen:
        problem = each.against
        if yes and problem is None:
            try:
                cleaning.remove(each.run.folder, with_checkpoints)
            except ConfigError as error:
                problem, failed = str(error), failed + 1
        told.append({**each.run.plain(), "bytes": each.bytes, "kept_because": problem,
                     "removed": yes and problem is None})  # fmt: skip
    if as_json:
        _print_json({"dry_run": not yes, "runs": told})
    else:
        _tell_cleaned(folder, told, yes)
    sys.exit(1 if failed else 0)


def _tell_cleaned(folder: Path, told: list[dict[str, Any]], yes: bool) -> None:
    going = [each for each in told if each["kept_because"] is None]
    if told:
        rows = [
            (each["name"], each["status"], size(each["bytes"]), "is kept: " + each["kept_because"]
             if each["kept_because"] else "removed" if yes else "would be removed")
            for each in told
        ]  # fmt: skip
        for line in columns([[in_a_line(cell) for cell in row] for row in rows]):
            click.echo(line)
    count = f"{len(going)} run{'' if len(going) == 1 else 's'}, {size(sum(each['bytes'] for each in going))}"
    if not going:
        say(f"{folder}: nothing to remove")
    elif yes:
        say(f"removed: {count}")
    else:
        say(f"to be removed: {count}. Nothing was removed: add --yes to do it")


def _require(folder: Path) -> None:
    """A folder that is none may be a command that was misspelt."""
    if folder.is_dir():
        return
    meant = nearest(str(folder), ("clean", "list"), 0.6)
    hint = f"; did you mean lockstep runs {meant}?" if meant else "; runs are in runs/, or where --out was"
    if re.match(r"\w+:/", str(folder)):  # a path has one slash of s3://
        hint = "; runs are looked at on a disk: copy them here first, with the tools of that storage"
    raise ConfigError(f"{folder}: there is no such folder{hint}")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(finite(value), indent=1))
