"""`lockstep watch`: a run while it trains, on a terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.common import JSON, complete_run_dir, examples, say
from lockstep.config.plain import columns, finite
from lockstep.errors import ConfigError
from lockstep.shown import in_a_line
from lockstep.terminal import colour

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lockstep.runs.watching import Look

# Seconds between two looks: on a terminal, and where lines scroll by or the run is on a pod.
_DRAWN_SECONDS, _LINES_SECONDS = 1.0, 5.0
_HEAD = ("rank", "host", "step", "doing", "memory", "lag")
_GOOD_ENDS = ("completed", "stopped early")


@click.command(
    epilog=examples(
        "lockstep watch",
        "lockstep watch runs/digits-20260101-120000",
        "lockstep watch runs/digits-20260101-120000 --once --json",
        "lockstep watch --pod team",
    )
)
@click.argument("run", type=click.Path(path_type=Path), required=False, shell_complete=complete_run_dir)
@click.option("--pod", "pod_name", metavar="NAME", help="The newest run of a pod, by SSH.")
@click.option("--once", is_flag=True, help="One look, and no waiting.")
@click.option("--wait", type=click.FloatRange(min=0), default=120.0, show_default=True,
              help="Seconds to wait for the run to begin.")  # fmt: skip
@click.option("--every", type=click.FloatRange(min=0.1), default=None, help="Seconds between two looks.")
@JSON
def watch(run: Path | None, pod_name: str | None, once: bool, wait: float, every: float | None, as_json: bool) -> None:
    """Show RUN while it trains: its metrics, what every rank is doing right now, memory, lag and the time left.

    RUN is a run's folder, or the name of one in runs/; the newest in runs/ where not given. Where there is no terminal,
    a line is printed every few seconds; with --json, an object. Ctrl-C leaves; the run goes on.

    Exit code 0 where the run came to a good end or is still at work, 1 where it did not.
    """
    if pod_name is not None and run is not None:
        raise click.UsageError(f"RUN {run} and --pod {pod_name}: name one of them")
    looking = _on_pod(pod_name) if pod_name is not None else _here(run)
    drawn = not as_json and not once and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    pause = every or (_DRAWN_SECONDS if drawn and not pod_name else _LINES_SECONDS)
    try:
        if once:
            _print(looking(), as_json, whole=True)
            return
        seen = _begun(looking, wait, pause)
        seen = _draw(looking, seen, pause) if drawn else _follow(looking, seen, pause, lambda new: _print(new, as_json))
        sys.exit(0 if seen.status in _GOOD_ENDS else 1)
    except KeyboardInterrupt:
        sys.exit(0)


def _here(run: Path | None) -> Callable[[], Look]:
    from lockstep.runs import table, watching

    if run is None:
        found = table.ordered(table.found(Path("runs"))) if Path("runs").is_dir() else []
        if not found:
            raise ConfigError("there is no run in runs/: name the folder of one")
        run = found[0].folder
    folder = run
    if not folder.exists() and (Path("runs") / folder).is_dir():
        folder = Path("runs") / folder
    return lambda: watching.look(folder)


def _on_pod(name: str) -> Callable[[], Look]:
    from lockstep.launchers.ssh import record as records
    from lockstep.launchers.ssh.pod import Pod
    from lockstep.runs.watching import look_of

    record = records.read(name)
    if record.folder is None:
        raise ConfigError(f"--pod {name}: no run was started there yet: lockstep pod run {name}")
    made = Pod(name, record.run_config())
    return lambda: look_of(made.look(record))


def _begun(looking: Callable[[], Look], wait: float, pause: float) -> Look:
    """Waits for the run to begin and returns the first look at it."""
    deadline, said = time.monotonic() + wait, False
    while not (seen := looking()).has_begun:
        if time.monotonic() >= deadline:
            missing = "there is no such folder" if not Path(seen.folder).is_dir() else "its ranks have not met"
            raise ConfigError(f"{seen.folder}: the run did not begin within {wait:g} s: {missing}. --wait waits longer")
        if not said:
            say(f"{in_a_line(seen.name)}: waiting up to {wait:g} s for it to begin")
            said = True
        time.sleep(min(pause, 1.0))
    return seen


def _follow(looking: Callable[[], Look], seen: Look, pause: float, show: Callable[[Look], object]) -> Look:
    show(seen)
    while not seen.has_ended:
        time.sleep(pause)
        seen = looking()
        show(seen)
    return seen


def _draw(looking: Callable[[], Look], seen: Look, pause: float) -> Look:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, no_color=colour(os.environ) is False or None)
    with Live(_view(seen), console=console, auto_refresh=False, transient=True) as display:
        seen = _follow(looking, seen, pause, lambda new: display.update(_view(new), refresh=True))
    _print(seen, as_json=False)
    return seen


def _view(seen: Look) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from lockstep.runs import watching

    style = "bold red" if seen.is_stale or (seen.has_ended and seen.status not in _GOOD_ENDS) else "bold"
    parts: list[Any] = [Text(in_a_line(watching.headline(seen)), style=style)]
    if seen.total_steps:
        bar = Table.grid()  # it ends its line, which the bar alone does not
        bar.add_row(ProgressBar(total=seen.total_steps, completed=seen.step, width=60))
        parts.append(bar)
    metrics = Table(box=None, pad_edge=False, show_header=False)
    for name, values in seen.series.items():
        metrics.add_row(Text(in_a_line(name)), Text(f"{seen.latest[name]:.4g}"), Text(watching.sparkline(values)))
    parts.append(metrics)
    if seen.live is not None:
        ranks = Table(*_HEAD, box=None, pad_edge=False)
        shown, more = watching.ranks_shown(seen.live)
        for each in shown:
            ranks.add_row(*map(Text, watching.rank_cells(each)))
        parts += ["", ranks, *([Text(f"and {more} more ranks", style="dim")] if more else [])]
    return Group(*parts)


def _print(seen: Look, as_json: bool, whole: bool = False) -> None:
    from lockstep.runs import watching

    if as_json:
        click.echo(json.dumps(finite(seen.plain())))
        return
    click.echo(watching.line(seen))
    if whole and seen.live is not None and not seen.has_ended:
        shown, more = watching.ranks_shown(seen.live)
        for line in columns([_HEAD, *map(watching.rank_cells, shown)]):
            click.echo(line)
        if more:
            click.echo(f"and {more} more ranks")
