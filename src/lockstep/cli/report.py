"""`lockstep report`: what became of runs, as a page in one file."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli import options
from lockstep.cli.help import examples
from lockstep.cli.messages import say
from lockstep.errors import ConfigError
from lockstep.mirror.url import Url


@click.command(
    epilog=examples(
        "lockstep report runs/digits-20260101-120000",
        "lockstep report runs/digits-20260101-120000 runs/digits-20260102-090000 -o both.html",
    )
)
@click.argument(
    "run_dirs",
    metavar="RUN [RUN]...",
    nargs=-1,
    required=True,
    type=options.run_dir,
    shell_complete=options.complete_run_dir,
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="The file to write; else report.html in the folder of the run, or of several in the current folder.",
)  # fmt: skip
def report(run_dirs: tuple[Path | Url, ...], out: Path | None) -> None:
    """Write a page of one run, or of several to compare, that opens in any browser and needs no network."""
    from lockstep.runs.report import REPORT_FILE, write_report

    folders = []
    for each in run_dirs:
        if isinstance(each, Url):
            raise ConfigError(
                f"RUN {each}: runs are looked at on a disk: copy the run's folder here first, with the tools of that "
                "storage; its own report.html is there, too"
            )
        folders.append(each)
    file = out or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    write_report(folders, file)
    say(f"{file}: {_named(folders)}, {file.stat().st_size / 1000:,.0f} kB")


def _named(folders: list[Path]) -> str:
    return folders[0].resolve().name if len(folders) == 1 else f"{len(folders)} runs"
