"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.mirror.url import Url, place


def out(given: str | Path) -> Path | Url:
    """Where runs' folders are made."""
    return place(given, "--out")


def run_dir(given: str | Path) -> Path | Url:
    """The folder of a run."""
    return place(given, "RUN_DIR")


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
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


def with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides
