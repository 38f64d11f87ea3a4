"""`lockstep plan`: whether a run fits devices that nobody has rented yet, and what a step of it costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import SET
from lockstep.errors import ConfigError
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.planner.devices import Target
    from lockstep.planner.figures import Step
    from lockstep.planner.plan import Plan


_REMEDIES_SECONDS = 600.0


@click.command(epilog="Example: lockstep plan examples/gpt-1.3b.yaml --on a100-40gx8 --on h200x1")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--on", "targets", multiple=True, metavar="DEVICExN", help="What to plan for: h200x8. May be repeated.")
@click.option("--devices", type=click.Path(path_type=Path), default=None, help="A YAML file with further devices.")
@click.option("--price", type=click.FloatRange(min=0), default=None, help="Of a device for an hour.")
@click.option("--quick", is_flag=True, help="Trace once: no advice, and no search for the largest batch.")
@click.option("--search", is_flag=True, help="Try other ways of spreading it, and rank those that fit.")
@click.option("--write", type=click.Path(path_type=Path), default=None, help="With --search: a new file for the best.")
@click.option("--page", type=click.Path(path_type=Path), default=None, help="Write the plan as a page (HTML).")
@click.option("--list", "lists", is_flag=True, help="Show the devices that are known, and nothing else.")
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, with an object per target.")
def plan(
    config: Path | None,
    targets: tuple[str, ...],
    devices: Path | None,
    price: float | None,
    quick: bool,
    search: bool,
    write: Path | None,
    page: Path | None,
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
    if config is None or not targets:
        raise ConfigError("name a config and what to plan for: lockstep plan CONFIG --on h200x8 (--list has the names)")
    for name, given in (("--page", page), ("--price", price)):
        if search and given is not None:
            raise ConfigError(f"{name} {given}: is for a plan, and --search compares many: leave one of them out")
    checked = load(config, overrides)
    wanted = [target(each, devices) for each in targets]
    if write is not None and (not search or len(wanted) != 1):
        raise ConfigError(f"--write {write}: is for --search with one target (--on)")
    from lockstep.planner.advice import advice
    from lockstep.planner.plan import make, traced
    from lockstep.planner.table import lines

    if search:
        sys.exit(_search(config, checked, overrides, wanted, write, as_json))
    found = []
    for each in wanted:
        made = make(config, overrides, each, checked.train.precision, seek_batch=not quick)
        found.append(made)
        if not as_json:

            def again(more: Sequence[str], target: Target = each) -> Step:
                return traced(config, [*overrides, *more], target.count)

            advised = [f"- {text}" for text in advice(made, checked, again)] if not quick else []
            if not quick and not made.fits:
                advised = [*_remedies(config, checked, overrides, made), *advised]
            click.echo(visible("\n".join([*lines(made, price), *advised])) + "\n")
    if page is not None:
        from lockstep.planner.page import page as drawn

        try:
            page.write_text(drawn(f"{checked.name or config.stem}: a plan", found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--page {page}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps([each.plain() for each in found]))
    sys.exit(0 if all(each.fits for each in found) else 1)


def _remedies(file: Path, config: RunConfig, overrides: tuple[str, ...], made: Plan) -> Iterator[str]:
    """What would make it fit, the cheapest first."""
    import time

    from lockstep.planner import remedies
    from lockstep.planner.traces import Traces

    trace = Traces(file, overrides, made.target.count, time.monotonic() + _REMEDIES_SECONDS)
    return remedies.lines(remedies.find(made, config, trace), made)


def _search(
    file: Path,
    config: RunConfig,
    overrides: tuple[str, ...],
    targets: list[Target],
    write: Path | None,
    as_json: bool,
) -> int:
    """The exit code: 1 where nothing fits one of the targets."""
    from lockstep.planner import search
    from lockstep.planner.plan import make

    told, fits = [], True
    for each in targets:

        def planned(more: Sequence[str], target: Target = each) -> Plan:
            return make(file, [*overrides, *more], target, config.train.precision, seek_batch=False)

        found = search.search(config, each, planned)
        best = found[0]
        fits = fits and best.plan is not None and best.plan.fits
        if as_json:
            told.append({
                "target": each.title,
                "ways": [{"way": one.way.title, "values": one.way.values, "why_not": one.why_not or None,
                          "plan": one.plan.plain() if one.plan is not None else None} for one in found],
            })  # fmt: skip
        else:
            click.echo(visible("\n".join([each.title, *search.lines(found)])) + "\n")
        if write is not None and best.plan is not None and best.plan.fits:
            search.write(config, best, each, write)
            click.echo(visible(f"{write}: {best.way.title}"), err=True)
    if as_json:
        click.echo(json.dumps(told))
    return 0 if fits else 1
