"""`lockstep evaluate`, `lockstep predict` and `lockstep export`: what to do with a trained model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.cli.common import (
    JSON,
    SET,
    WEIGHTS,
    complete_run_dir,
    examples,
    leaving_at_once,
    require_new,
    run_dir,
    say,
    say_whose_code,
)
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import visible

RUN = click.argument("run_dir", metavar="RUN", type=run_dir, shell_complete=complete_run_dir)
STEP = click.option(
    "--step", type=click.IntRange(min=0), default=None, help="The checkpoint of this step; else the newest."
)
BEST = click.option("--best", is_flag=True, help="The best checkpoint, by checkpoint.keep.")
DATA = click.option("--data", default=None, metavar="NAME", help="test, val, train or a name that the task defines.")
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
@DATA
@PROCESSES
@SET
@WORK
@JSON
@leaving_at_once
def evaluate(run_dir: Path | Url, data: str | None, as_json: bool, **chosen: Any) -> None:
    """Measure the model of RUN over a dataset: its loss and metrics, exact on any number of processes.

    A line of RUN/evaluations.jsonl notes the result; nothing else of RUN changes.
    """
    found = _carry_out(run_dir, {"do": "evaluate", "data": data}, "evaluation", **chosen)
    if found is None:
        return
    if found.get("unwritten"):
        say(str(found["unwritten"]))
    rows = [("metric", f"step {found['step']}")]
    rows += [(name, "nan" if value is None else f"{value:.6g}") for name, value in found["metrics"].items()]
    rows += [(f"examples of {name}", str(count)) for name, count in found["examples"].items()]
    _show(found, as_json, rows)


@click.command(epilog=examples("lockstep predict runs/digits-20260101-120000 --data test --out predictions.parquet"))
@RUN
@STEP
@BEST
@DATA
@click.option("--input", "input_", default=None, metavar="FILE", help="Given to the task's predict_data(input).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new .parquet or .jsonl file.")
@click.option("--chunk", type=click.IntRange(min=1), default=1024, help="Examples in every part (default: 1024).")
@WEIGHTS
@PROCESSES
@SET
@WORK
@JSON
@leaving_at_once
def predict(
    run_dir: Path | Url, data: str | None, input_: str | None, out: Path, chunk: int, weights: str, as_json: bool,
    **chosen: Any,
) -> None:  # fmt: skip
    """Write what the model of RUN predicts for every example, in the order of the data: the task's predict().

    Finished parts are in OUT.parts-* until all are there; the same command resumes after them where it was killed.
    """
    if data is not None and input_ is not None:
        raise ConfigError(f"--data {data} and --input {input_}: name one of them")
    out = out.absolute()
    if out.suffix.lower() not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: must end with .parquet or .jsonl")
    require_new(out)
    if out.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"--out {out}: Parquet needs pyarrow: pip install 'lockstep-train[predict]'; or name a .jsonl file"
        )
    source = str(Path(input_).absolute()) if input_ is not None and Path(input_).exists() else input_
    order = {"do": "predict", "data": data, "input": source, "out": str(out), "chunk": chunk, "weights": weights}
    again = f"; the same command resumes after the parts in {out}.parts-*"
    found = _carry_out(run_dir, order, "prediction", again, **chosen)
    if found is not None:
        rows = [("rows", str(found["rows"])), ("step", str(found["step"])), ("file", str(found["out"]))]
        _show(found, as_json, rows)


@click.command(epilog=examples("lockstep export runs/digits-20260101-120000 --best --to onnx --out digits.onnx"))
@RUN
@click.option("--to", type=click.Choice(["safetensors", "hf", "torch-export", "onnx"]), required=True, help="The form.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new file; for hf, a new folder.")
@click.option("--merge", is_flag=True, help="Add peft's adapters into the weights of their model; not for safetensors.")
@STEP
@BEST
@WEIGHTS
@SET
@JSON
def export(
    run_dir: Path | Url, to: str, out: Path, merge: bool, step: int | None, best: bool, weights: str,
    overrides: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Write the model of RUN in a form that other programs open: weights, a Hugging Face folder, a whole program.

    One process does it, whatever number of ranks wrote the checkpoint.
    """
    from lockstep.distributed.topology import launched
    from lockstep.launchers import after
    from lockstep.launchers.resume import Wanted, chosen_step

    if launched(os.environ):
        raise ConfigError("lockstep export is done by one process: run it by itself, not under a launcher")
    out = out.absolute()
    require_new(out)
    if to != "safetensors":
        order = {"do": "export", "out": str(out), "to": to, "merge": merge, "weights": weights}
        how: dict[str, Any] = {"step": step, "best": best, "overrides": overrides, "processes": None, "work": Path()}
        found = _carry_out(run_dir, order, "export", **how)
        if found is None:
            return
        chosen = int(found["step"])
    else:
        if merge:
            raise ConfigError("--merge: safetensors has the weights as the checkpoint has them: use --to hf")
        folder = after.run_folder_of(run_dir, needs_task=False)
        from lockstep.checkpoint.retention import judged_by

        chosen = chosen_step(folder, Wanted(step, best), judged_by(folder)[1], verify=False)
        from lockstep.tasks.export import write_weights

        if write_weights(folder, chosen, out, averages=weights == "ema"):
            say("the checkpoint has no frozen weights (checkpoint.save), and so has the file: take them from init_from")
    if as_json:
        click.echo(json.dumps({"out": str(out), "to": to, "step": chosen, "weights": weights}))
        return
    which = f"step {chosen}, averaged" if weights == "ema" else f"step {chosen}"
    click.echo(visible(f"{out}: {to} of {which}"))


def _carry_out(
    run_dir: Path | Url, order: dict[str, Any], what: str, again: str = "", *,
    step: int | None, best: bool, processes: int | None, overrides: tuple[str, ...], work: Path,
) -> dict[str, Any] | None:  # fmt: skip
    """Returns the result on the process that has it; exits where the work failed or was stopped."""
    from lockstep.launchers import after
    from lockstep.launchers.resume import Wanted

    folder = after.run_folder_of(run_dir)
    say_whose_code(folder)
    config = after.config_of(folder, Wanted(step, best), order, overrides, processes)
    with _output_on_stderr():
        ended, found = after.carry_out(config, work, say)
    if ended.result is not None and ended.result.failure is not None:
        assert ended.config is not None and ended.folder is not None
        say(ended.result.failure.render(int(ended.config.processes)))
        if (ended.folder / "logs").is_dir():
            say(f"logs: {ended.folder / 'logs'}")
    elif ended.exit_code in (PREEMPTED_EXIT_CODE, INTERRUPTED_EXIT_CODE):
        say(f"the {what} was asked to stop before it was done{again}")
    if ended.exit_code:
        sys.exit(ended.exit_code)
    if ended.message:
        say(ended.message)
    return found


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Sends what ranks print to standard error, so that standard output has the table alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _show(found: Mapping[str, Any], as_json: bool, rows: list[tuple[str, str]]) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(visible(f"{name.ljust(width)}  {value}"))
