"""`lockstep plan`: whether a run fits devices, and what a step costs, without having the devices."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.common import SET, examples, say, say_whose_code
from lockstep.errors import ConfigError
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.planner.devices import Target
    from lockstep.planner.plan import Plan
    from lockstep.planner.search import Way


Note = Callable[[str], None]


@click.command(epilog=examples("lockstep plan examples/gpt-1.3b.yaml --on a100-40gx8 --on h200x1"))
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option(
    "--hf",
    type=click.Path(path_type=Path),
    default=None,
    metavar="PATH",
    help="In place of CONFIG: a language model of transformers, by its config.json or folder; no weights are needed.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, help="With --hf: rows of a batch (default: 8).")
@click.option(
    "--length", type=click.IntRange(min=2), help="With --hf: tokens of a row (default: 1024, or what the model has)."
)
@click.option("--on", "targets", multiple=True, metavar="DEVICExN", help="What to plan for: h200x8. May be repeated.")
@click.option("--devices", type=click.Path(path_type=Path), default=None, help="A YAML file with further devices.")
@click.option("--search", is_flag=True, help="Try other ways of spreading it, and rank those that fit.")
@click.option("--write", type=click.Path(path_type=Path), default=None, help="With --search: a new file for the best.")
@click.option("--page", type=click.Path(path_type=Path), default=None, help="Write it as a page (HTML), a search too.")
@click.option("--list", "lists", is_flag=True, help="Show the devices that are known, and nothing else.")
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, with an object per target.")
def plan(
    config: Path | None, hf: Path | None, batch_size: int, length: int | None, targets: tuple[str, ...],
    devices: Path | None, search: bool, write: Path | None, page: Path | None, lists: bool,
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
            click.echo(f"{name:<14}{device.memory:6.1f} GiB  {device.source}")
        return
    if (config is None) is (hf is None) or not targets:
        raise ConfigError(
            "name a config and what to plan for: lockstep plan CONFIG --on h200x8 (--list has the names); or --hf with "
            "a config.json"
        )
    if config is None:
        assert hf is not None
        config = click.get_current_context().with_resource(_config_for(hf, batch_size, length))
    else:
        say_whose_code(config)
    checked = load(config, overrides)
    wanted = [target(each, devices) for each in targets]
    if write is not None and (not search or len(wanted) != 1):
        raise ConfigError(f"--write {write}: is for --search with one target (--on)")
    if checked.train.precision == "fp8":
        say("train.precision: fp8 is planned as bf16, which needs as much memory or more, and more time")
    if search:
        sys.exit(_search(config, checked, overrides, wanted, write, page, as_json))
    from lockstep.planner.plan import lines, make

    found = []
    for each in wanted:
        with _telling() as note:
            found.append(make(config, overrides, each, checked.train.precision, seek_batch=True, note=note))
        if not as_json:
            click.echo(visible("\n".join(lines(found[-1]))) + "\n")
    if page is not None:
        from lockstep.planner.page import plans_page, write_page

        write_page(page, plans_page(checked.name or config.stem, found, checked.train.precision))
    if as_json:
        click.echo(json.dumps([each.plain() for each in found]))
    sys.exit(0 if all(each.fits for each in found) else 1)


@contextlib.contextmanager
def _config_for(hf: Path, batch_size: int, length: int | None) -> Iterator[Path]:
    """Writes a config that trains all weights of a model of transformers on random tokens, in bf16."""
    from lockstep.adapters.huggingface import length_to_plan

    asked, length = length, length_to_plan(hf, length)
    limited = " (all that the model has positions for)" if asked is None and length < 1024 else ""
    task = {"type": "lockstep.adapters.huggingface:CausalLM", "folder": str(hf.absolute()), "init": "config",
            "data": "synthetic", "max_length": length}  # fmt: skip
    config = {"task": task, "train": {"steps": 2, "batch_size": batch_size, "precision": "bf16"}}
    say(f"{hf}: planned with {batch_size} x {length} tokens{limited} and precision bf16 (--set changes it)")
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        file = Path(folder) / f"{(hf.parent if hf.suffix else hf).absolute().name}.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")  # which is YAML too
        yield file


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


def _search(
    file: Path, config: RunConfig, overrides: tuple[str, ...], targets: list[Target], write: Path | None,
    page: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Returns the exit code: 1 where nothing fits one of the targets."""
    from lockstep.planner import search

    found = []
    for each in targets:
        ways = _ways(file, config, overrides, each)
        found.append((each, ways))
        if not as_json:
            click.echo(visible("\n".join([each.title, *search.lines(ways)])) + "\n")
        if write is not None and ways[0].fits:
            search.write(config, ways[0], each, write)
            click.echo(visible(f"{write}: {ways[0].title}"), err=True)
    if page is not None:
        from lockstep.planner.page import search_page, write_page

        write_page(page, search_page(config.name or file.stem, found, config.train.precision))
    if as_json:
        click.echo(json.dumps([{"target": each.title, "ways": search.plain(ways)} for each, ways in found]))
    return 0 if all(ways[0].fits for _, ways in found) else 1


def _ways(file: Path, config: RunConfig, overrides: tuple[str, ...], target: Target) -> list[Way]:
    from lockstep.planner.plan import make
    from lockstep.planner.search import search

    def planned(more: Sequence[str]) -> Plan:
        return make(file, [*overrides, *more], target, config.train.precision, seek_batch=False)

    with _telling() as tell:
        return search(config, target, planned, lambda title: tell(f"{target.title}: {title}"))
