"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a config value; VALUE is YAML."
)
OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are made.")
PROFILE = click.option("--profile", is_flag=True, help="Write a trace of a few steps; short for profile.enabled=true.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


def with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides
