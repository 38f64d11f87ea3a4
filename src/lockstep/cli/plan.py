"""`lockstep plan`: whether a run fits devices, and what a step costs, without having the devices."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.common import SET, examples, say, say_whose_code
from lockstep.errors import ConfigError
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.planner.devices import Target
    from lockstep.planner.figures import Step
    from lockstep.planner.plan import Plan


Note = Callable[[str], None]

_REMEDIES_SECONDS = 600.0


@click.command(epilog=examples("lockstep plan examples/gpt-1.3b.yaml --on a100-40gx8 --on h200x1"))
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--on", "targets", multiple=True, metavar="DEVICExN", help="What to plan for: h200x8. May be repeated.")
@click.option("--devices", type=click.Path(path_type=Path), default=None, help="A YAML file with further devices.")
@click.option("--price", type=click.FloatRange(min=0), default=None, help="Of a device for an hour.")
@click.option("--quick", is_flag=True, help="Trace once: no advice, and no search for the largest batch.")
@click.option("--search", is_flag=True, help="Try other ways of spreading it, and rank those that fit.")
@click.option("--write", type=click.Path(path_type=Path), default=None, help="With --search: a new file for the best.")
@click.option("--page", type=click.Path(path_type=Path), default=None, help="Write it as a page (HTML), a search too.")
@click.option(
    "--trace", "trace_to", type=click.Path(path_type=Path), default=None,
    help="For TPUs: write the traced step to a file (MINE.step), to be compiled later: lockstep plan MINE.step",
)  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="Show the devices that are known, and nothing else.")
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, with an object per target.")
def plan(
    config: Path | None, targets: tuple[str, ...], devices: Path | None, price: float | None, quick: bool,
    search: bool, write: Path | None, page: Path | None, trace_to: Path | None, lists: bool,
    overrides: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Trace a step of CONFIG on this machine, without any GPU and without memory for the model: what it needs there.

    Exit code 0 where it fits all targets, 1 where it does not.
    """
    from lockstep.config.load import load
    from lockstep.planner.devices import known, target

    if lists:
        if as_json:
            click.echo(json.dumps([{"name": name, **device.model_dump()} for name, device in known().items()]))
            return
        for name, device in known().items():
            click.echo(f"{name:<12}{device.memory:8.1f} GiB  {device.source}")
        return
    if config is not None and config.suffix == ".step":
        sys.exit(_of_step(config, targets, price, as_json))
    if config is None or not targets:
        raise ConfigError("name a config and what to plan for: lockstep plan CONFIG --on h200x8 (--list has the names)")
    say_whose_code(config)
    checked = load(config, overrides)
    wanted = [target(each, devices) for each in targets]
    if write is not None and (not search or len(wanted) != 1):
        raise ConfigError(f"--write {write}: is for --search with one target (--on)")
    if trace_to is not None:
        _trace(config, overrides, wanted, trace_to)
        return
    if checked.train.precision == "fp8":
        say("train.precision: fp8 is planned as bf16, which needs as much memory or more, and more time")
    from lockstep.planner.advice import advice
    from lockstep.planner.plan import lines, make, traced

    if search:
        sys.exit(_search(config, checked, overrides, wanted, price, write, page, as_json))
    found, advised = [], []
    for each in wanted:
        with _telling() as note:
            made = make(config, overrides, each, checked.train.precision, not quick, note)
            found.append(made)

            def again(more: Sequence[str], target: Target = each, note: Note = note) -> Step:
                note(f"{target.title}: advice: tracing with {', '.join(more)}")
                return traced(config, [*overrides, *more], target)

            advised.append(list(advice(made, checked, again)) if not quick else [])
            hints = [f"- {one.text}" for one in advised[-1]]
            if not (as_json or quick or made.fits) and each.slice is None:
                note(f"{each.title}: looking for what would make it fit")
                hints = [*_remedies(config, checked, overrides, made), *hints]
        if not as_json:
            click.echo(visible("\n".join([*lines(made, price), *hints])) + "\n")
    if page is not None:
        from lockstep.planner.page import plans_page, write_page

        write_page(page, plans_page(checked.name or config.stem, found, advised, checked.train.precision, price))
    if as_json:
        click.echo(json.dumps([
            {**each.plain(), "advice": [asdict(one) for one in hints]}
            for each, hints in zip(found, advised, strict=True)
        ]))  # fmt: skip
    sys.exit(0 if all(each.fits for each in found) else 1)


@contextlib.contextmanager
def _telling() -> Iterator[Note]:
    """Shows what is under way, on standard error: a line per phase, or one line that changes on a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: say(f"{text} ...")
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(f"{visible(text)} ..."))


def _trace(config: Path, overrides: tuple[str, ...], targets: list[Target], file: Path) -> None:
    from lockstep.planner.tpu import engine, stored

    if len(targets) != 1 or targets[0].slice is None:
        raise ConfigError(f"--trace {file}: is for one slice of Cloud TPUs (--on v4-32)")
    if not stored.is_step(file):
        raise ConfigError(f"--trace {file}: the name must end with {stored.SUFFIX}, by which it is known later")
    if file.exists():
        raise ConfigError(f"--trace {file}: there is one already")
    with _telling() as note:
        note(f"{targets[0].title}: tracing a step")
        engine.trace(config, overrides, targets[0].slice, file)
    traced, _ = stored.read(file)
    click.echo(visible(f"{file}: a step of {traced.parameters:,} parameters for {targets[0].title}, traced in "
                       f"{traced.seconds:g} s; lockstep plan {file} compiles it"))  # fmt: skip


def _of_step(file: Path, names: tuple[str, ...], price: float | None, as_json: bool) -> int:
    """Compiles a step that was traced before, for its slice or for others of as many devices."""
    from lockstep.planner.devices import target
    from lockstep.planner.plan import lines, of_file
    from lockstep.planner.tpu import stored

    wanted = [target(each) for each in names or (stored.read(file)[0].slice,)]
    for each in wanted:
        if each.slice is None:
            raise ConfigError(f"{file}: is a step for TPUs, and {each.title} is none: name a slice (--on v4-32)")
    found = []
    for each in wanted:
        with _telling() as note:
            note(f"{each.title}: compiling {file}")
            found.append(of_file(file, each))
    if as_json:
        click.echo(json.dumps([each.plain() for each in found]))
    else:
        click.echo(visible("\n\n".join("\n".join(lines(each, price)) for each in found)))
    return 0 if all(each.fits for each in found) else 1


def _remedies(file: Path, config: RunConfig, overrides: tuple[str, ...], made: Plan) -> Iterator[str]:
    """Yields what would make it fit, the cheapest first."""
    from lockstep.planner import fixes
    from lockstep.planner.traces import Traces

    trace = Traces(file, overrides, made.target.count, time.monotonic() + _REMEDIES_SECONDS)
    return fixes.lines(fixes.find(made, config, trace), made)


def _search(
    file: Path, config: RunConfig, overrides: tuple[str, ...], targets: list[Target], price: float | None,
    write: Path | None, page: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Returns the exit code: 1 where nothing fits one of the targets."""
    from lockstep.planner import search
    from lockstep.planner.plan import make

    results, fits, ways = [], True, []
    for each in targets:

        def planned(more: Sequence[str], target: Target = each) -> Plan:
            return make(file, [*overrides, *more], target, config.train.precision, seek_batch=False)

        with _telling() as tell:

            def note(title: str, target: Target = each, tell: Note = tell) -> None:
                tell(f"{target.title}: {title}")

            found = search.search(config, each, planned, note)
        ways.append((each, found))
        best = found[0]
        fits = fits and best.plan is not None and best.plan.fits
        if as_json:
            results.append({"target": each.title, "ways": search.plain(found, price)})
        else:
            click.echo(visible("\n".join([each.title, *search.lines(found, price)])) + "\n")
        if write is not None and best.plan is not None and best.plan.fits:
            search.write(config, best, each, write)
            click.echo(visible(f"{write}: {best.way.title}"), err=True)
    if page is not None:
        from lockstep.planner.page import search_page, write_page

        write_page(page, search_page(config.name or file.stem, ways, config.train.precision, price))
    if as_json:
        click.echo(json.dumps(results))
    return 0 if fits else 1
