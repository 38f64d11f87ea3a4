"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.mirror.url import Url, place


class Place(click.ParamType):
    """A folder, or the URL of one in object storage."""

    name = "dir or url"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path | Url:
        if isinstance(value, (Path, Url)):
            return value
        setting = parameter.opts[0] if isinstance(parameter, click.Option) else "RUN_DIR"
        return place(value, setting)


SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a config value; VALUE is YAML."
)
OUT = click.option(
    "--out", type=Place(), default=Path("runs"), help="Where run folders are made: a folder, s3://... or gs://..."
)
PROFILE = click.option("--profile", is_flag=True, help="Write a trace of a few steps; short for profile.enabled=true.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


def with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides
