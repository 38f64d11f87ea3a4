"""`lockstep evaluate` and `lockstep predict`: what to do with a model once it is trained."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli import options
from lockstep.cli.help import examples
from lockstep.cli.interrupt import leaving_at_once
from lockstep.cli.messages import say, say_whose_code
from lockstep.cli.options import JSON, SET
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.launchers.after import Done

RUN = click.argument("run_dir", metavar="RUN", type=options.run_dir, shell_complete=options.complete_run_dir)
STEP = click.option(
    "--step", type=click.IntRange(min=0), default=None, help="The checkpoint of this step; else the newest."
)
BEST = click.option("--best", is_flag=True, help="The best checkpoint, by checkpoint.keep.")
PROCESSES = click.option(
    "-n", "--processes", type=click.IntRange(min=1), default=None, help="How many; as the run had where not given."
)
WORK = click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    help="For launch: slurm and ssh: where its logs go.",
)


@click.command(epilog=examples("lockstep evaluate runs/digits-20260101-120000 --best --data test -n 2"))
@RUN
@STEP
@BEST
@click.option("--data", default=None, metavar="NAME", help="test, val, train or a name of the task's own.")
@PROCESSES
@SET
@WORK
@JSON
@leaving_at_once
def evaluate(
    run_dir: Path | Url,
    step: int | None,
    best: bool,
    data: str | None,
    processes: int | None,
    overrides: tuple[str, ...],
    work: Path,
    as_json: bool,
) -> None:
    """Measure the model of RUN over a dataset: its loss and metrics, exact on any number of processes.

    A line of RUN/evaluations.jsonl notes what came of it; nothing else of RUN changes.
    """
    from lockstep.launchers import after
    from lockstep.launchers.resume import Wanted

    folder = after.run_folder_of(run_dir)
    say_whose_code(folder)
    order = {"do": "evaluate", "data": data}
    config = after.config_of(folder, Wanted(step, best), order, overrides, processes)
    with _output_on_stderr():
        done = after.carry_out(config, work, say)
    found = _finished(done, "evaluation")
    if found is None:
        return
    if found.get("unwritten"):
        say(str(found["unwritten"]))
    _show(found, as_json, _metrics_table(found))


@click.command(epilog=examples("lockstep predict runs/digits-20260101-120000 --data test --out predictions.parquet"))
@RUN
@STEP
@BEST
@click.option("--data", default=None, metavar="NAME", help="test, val, train or a name of the task's own.")
@click.option("--input", "input_", default=None, metavar="FILE", help="Given to the task's predict_data(input).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new .parquet or .jsonl file.")
@click.option("--chunk", type=click.IntRange(min=1), default=1024, help="Examples in every part (default: 1024).")
@options.WEIGHTS
@PROCESSES
@SET
@WORK
@JSON
@leaving_at_once
def predict(
    run_dir: Path | Url,
    step: int | None,
    best: bool,
    data: str | None,
    input_: str | None,
    out: Path,
    chunk: int,
    weights: str,
    processes: int | None,
    overrides: tuple[str, ...],
    work: Path,
    as_json: bool,
) -> None:
    """Write what the model of RUN predicts for every example, in the order of the data: the task's predict().

    Finished parts are in OUT.parts until all are there; the same command goes on after them where it was killed.
    """
    from lockstep.launchers import after
    from lockstep.launchers.resume import Wanted

    if data is not None and input_ is not None:
        raise ConfigError(f"--data {data} and --input {input_}: name one of them")
    out = out.absolute()
    _check_out(out)
    folder = after.run_folder_of(run_dir)
    say_whose_code(folder)
    source = str(Path(input_).absolute()) if input_ is not None and Path(input_).exists() else input_
    order = {"do": "predict", "data": data, "input": source, "out": str(out), "chunk": chunk, "weights": weights}
    config = after.config_of(folder, Wanted(step, best), order, overrides, processes)
    with _output_on_stderr():
        done = after.carry_out(config, work, say)
    found = _finished(done, "prediction", f"; the same command goes on after the parts in {out}.parts")
    if found is not None:
        rows = [("rows", str(found["rows"])), ("step", str(found["step"])), ("file", str(found["out"]))]
        _show(found, as_json, rows)


def _check_out(out: Path) -> None:
    """What can be known before anything is started."""
    if out.suffix.lower() not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: must end with .parquet or .jsonl")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already: name a file that is not, or move it away")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it, or name another one")
    import importlib.util

    if out.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"--out {out}: Parquet needs pyarrow: pip install 'lockstep-train[predict]'; or name a .jsonl file"
        )


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """What ranks print goes to standard error, so that the table is all there is on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _finished(done: Done, what: str, go_on: str = "") -> dict[str, Any] | None:
    """What was found, on the process that has it; ends this one where the work did not come to its end."""
    if done.failure is not None:
        say(done.failure.render(done.processes))
        if done.folder is not None and (done.folder / "logs").is_dir():
            say(f"logs: {done.folder / 'logs'}")
        sys.exit(done.exit_code)
    if done.exit_code in (PREEMPTED_EXIT_CODE, INTERRUPTED_EXIT_CODE):
        say(f"the {what} was asked to stop before it was done{go_on}")
    if done.exit_code:
        sys.exit(done.exit_code)
    if done.message is not None:
        say(done.message)
        return None
    return done.found


def _metrics_table(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("metric", f"step {found['step']}")]
    rows += [(name, "nan" if value is None else f"{value:.6g}") for name, value in found["metrics"].items()]
    rows += [(f"examples of {name}", str(count)) for name, count in found["examples"].items()]
    return rows


def _show(found: Mapping[str, Any], as_json: bool, rows: list[tuple[str, str]]) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(visible(f"{name.ljust(width)}  {value}"))
