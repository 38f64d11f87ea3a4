"""`lockstep runs`, `report`, `serve`, `sweep` and `profile`: commands that look at runs. Need no torch."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.common import JSON, complete_run_dir, examples, run_dir, say
from lockstep.config.plain import columns, finite
from lockstep.errors import ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import in_a_line

_COLOURS = {"completed": "green", "stopped early": "green", "running": "cyan", "failed": "red", "lost": "red"}
_SORTS = ("started", "name", "status", "step", "best", "duration")
# What summary.json, or the lack of one, says; with dashes for a shell.
_STATUSES = (
    "running", "completed", "stopped-early", "failed", "lost", "interrupted", "preempted", "pruned", "queued",
)  # fmt: skip


@click.command(
    epilog=examples(
        "lockstep runs", "lockstep runs experiments --status failed --sort duration", "lockstep runs --name digits"
    )
)
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--status", "statuses", multiple=True, type=click.Choice(_STATUSES), help="May be repeated.")
@click.option("--name", "patterns", multiple=True, metavar="PATTERN", help="Part of the name, or a pattern with *.")
@click.option("--sort", type=click.Choice(_SORTS), default="started", help="The newest, best, ... first.")
@click.option("--reverse", is_flag=True, help="The other way round.")
@JSON
def runs(
    folder: Path, statuses: tuple[str, ...], patterns: tuple[str, ...], sort: str, reverse: bool, as_json: bool
) -> None:
    """Show the runs in FOLDER (runs/ where not given): status, step, best value, duration.

    A run is called lost that says nothing any more and never said how it ended, and queued before its job begins.
    """
    from lockstep.runs import table

    _require(folder)
    found = table.ordered(table.matching(table.found(folder), statuses, patterns), sort, reverse)
    if as_json:
        click.echo(json.dumps(finite([each.plain() for each in found]), indent=1))
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


def _require(folder: Path) -> None:
    if folder.is_dir():
        return
    hint = "; runs are in runs/, or where --out was"
    if re.match(r"\w+:/", str(folder)):  # a path has one slash of s3://
        hint = "; runs are looked at on a disk: copy them here first, with the tools of that storage"
    raise ConfigError(f"{folder}: there is no such folder{hint}")


@click.command(
    epilog=examples(
        "lockstep report runs/digits-20260101-120000",
        "lockstep report runs/digits-20260101-120000 runs/digits-20260102-090000 -o both.html",
    )
)
@click.argument(
    "run_dirs", metavar="RUN [RUN]...", nargs=-1, required=True, type=run_dir, shell_complete=complete_run_dir
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="The file to write; else report.html in the folder of the run, or of several in the current folder.",
)  # fmt: skip
def report(run_dirs: tuple[Path | Url, ...], out: Path | None) -> None:
    """Write a page of one run, or of several to compare, that opens in any browser and needs no network.

    The folder of a sweep stands for all its trials.
    """
    from lockstep.record.trials import DEFINITION_FILE
    from lockstep.runs.reader import run_folders
    from lockstep.runs.report import REPORT_FILE, write_report

    folders: list[Path] = []
    for each in run_dirs:
        if isinstance(each, Url):
            raise ConfigError(
                f"RUN {each}: runs are looked at on a disk: copy the run's folder here first, with the tools of that "
                "storage; its own report.html is there, too"
            )
        found = list(run_folders(each)) if (each / DEFINITION_FILE).is_file() else [each]
        if not found:
            raise ConfigError(f"RUN {each}: no trial of this sweep has begun yet, so there is nothing to show")
        folders += found
    beside = run_dirs[0] if len(run_dirs) == 1 else Path()
    file = out or Path(str(beside)) / REPORT_FILE
    write_report(folders, file)
    named = folders[0].resolve().name if len(folders) == 1 else f"{len(folders)} runs"
    say(f"{file}: {named}, {file.stat().st_size / 1000:,.0f} kB")


@click.command(epilog=examples("lockstep serve", "lockstep serve experiments --port 8000"))
@click.argument("runs", type=click.Path(path_type=Path), default="runs")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="0 is any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; off loopback, with a token.")
def serve(runs: Path, port: int, host: str) -> None:
    """Show all runs in the folder RUNS in a browser, until Ctrl-C."""
    from lockstep.runs.server import RunsFolder, Server

    _require(runs)
    with Server(RunsFolder(runs), host, port) as server:
        if server.token is not None:
            say(f"--host {host}: not for this machine alone. Whoever has the token in the address sees the runs; it "
                "travels in the clear: use a network that is yours, or SSH to a port on loopback")  # fmt: skip
        say(f"{len(server.runs.folders())} runs of {runs} at the address below; Ctrl-C ends it")
        click.echo(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


@click.command(epilog=examples("lockstep sweep runs/digits-sweep-20260101-120000"))
@click.argument("folder", type=click.Path(path_type=Path))
@JSON
def sweep(folder: Path, as_json: bool) -> None:
    """Show the trials of the sweep in FOLDER, and keep the best config of those that have ended."""
    from lockstep.record import trials

    asked = trials.read_sweep(folder)
    found = trials.read_trials(folder, asked.metric)
    code = trials.conclude(found, asked, folder, (lambda text: None) if as_json else say)
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


@click.command(epilog=examples("lockstep profile --seconds 2", "lockstep profile 127.0.0.1:9012 127.0.0.1:9013"))
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@click.option("--seconds", type=click.FloatRange(min=0.01, max=30), default=1.0, help="How long the trace is to be.")
def profile(addresses: tuple[str, ...], seconds: float) -> None:
    """Take a trace of ranks that are training with a profile section, at 127.0.0.1:9012 where no ADDRESS is given."""
    from lockstep.profiler.demand import capture

    failures = capture(addresses or ("127.0.0.1:9012",), seconds)
    if failures:
        raise ConfigError("\n".join(f"{address}: no profile was taken: {why}" for address, why in failures.items()))
    say("written into profile/proc_N of the run's folder; Perfetto and TensorBoard show it")
