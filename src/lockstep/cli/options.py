"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.mirror.url import Url, place

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def out(given: str | Path) -> Path | Url:
    """Where runs' folders are made."""
    return place(given, "--out")


def run_dir(given: str | Path) -> Path | Url:
    """The folder of a run."""
    return place(given, "RUN_DIR")


def complete_run_dir(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For a shell: the runs that are in runs/, or else whatever folder is being typed."""
    from click.shell_completion import CompletionItem

    names = sorted((str(file.parent) for file in Path("runs").glob("*/summary.json")), reverse=True)
    fitting = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return fitting or [CompletionItem(incomplete, type="dir")]


RUN_DIR = click.argument("run_dir", type=run_dir, shell_complete=complete_run_dir)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a config value; VALUE is YAML."
)
OUT = click.option(
    "--out",
    type=out,
    default="runs",
    metavar="DIR|URL",
    help="Where run folders are made: a folder, s3://... or gs://...",
)
WEIGHTS = click.option(
    "--weights",
    type=click.Choice(["raw", "ema"]),
    default="raw",
    help="As they were trained, or averaged by train.ema.",
)
PROFILE = click.option("--profile", is_flag=True, help="Write a trace of a few steps; short for profile.enabled=true.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


def with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides
