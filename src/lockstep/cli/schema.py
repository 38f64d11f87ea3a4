"""`lockstep schema`."""

from __future__ import annotations

import json

import click

from lockstep.cli.help import examples


@click.command(epilog=examples("lockstep schema > lockstep.schema.json"))
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from lockstep.config.schema import RunConfig

    click.echo(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2))
