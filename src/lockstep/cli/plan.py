"""`lockstep plan`: whether a run fits devices that nobody has rented yet, and what a step of it costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from lockstep.cli.options import SET
from lockstep.errors import ConfigError
from lockstep.shown import visible


@click.command(epilog="Example: lockstep plan examples/gpt-1.3b.yaml --on a100-40gx8 --on h200x1")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--on", "targets", multiple=True, metavar="DEVICExN", help="What to plan for: h200x8. May be repeated.")
@click.option("--devices", type=click.Path(path_type=Path), default=None, help="A YAML file with further devices.")
@click.option("--price", type=click.FloatRange(min=0), default=None, help="Of a device for an hour.")
@click.option("--batch/--no-batch", "seek", default=True, help="Whether to look for the largest batch that fits.")
@click.option("--list", "lists", is_flag=True, help="Show the devices that are known, and nothing else.")
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, with an object per target.")
def plan(
    config: Path,
    targets: tuple[str, ...],
    devices: Path | None,
    price: float | None,
    seek: bool,
    lists: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Trace a step of CONFIG on this machine, without any GPU and without memory for the model: what it needs there.

    Exit code 0 where it fits all targets, 1 where it does not.
    """
    from lockstep.config.load import load
    from lockstep.planner.devices import known, target

    if lists:
        for name, device in known().items():
            click.echo(f"{name:<12}{device.memory:8.1f} GiB  {device.source}")
        return
    if not targets:
        raise ConfigError("name what to plan for: --on h200x8 (lockstep plan CONFIG --list has the names)")
    checked = load(config, overrides)
    wanted = [target(each, devices) for each in targets]
    from lockstep.planner.plan import make
    from lockstep.planner.table import lines

    found = []
    for each in wanted:
        made = make(config, overrides, each, checked.train.precision, seek)
        found.append(made)
        if not as_json:
            click.echo(visible("\n".join(lines(made, price))) + "\n")
    if as_json:
        click.echo(json.dumps([each.plain() for each in found]))
    sys.exit(0 if all(each.fits for each in found) else 1)
