"""`lockstep schema`."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from lockstep.config.schema import RunConfig

    click.echo(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2))
