"""`lockstep export`: a trained model in a form that other programs open."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from lockstep.cli.after import BEST, RUN, STEP
from lockstep.cli.help import examples
from lockstep.cli.messages import say_whose_code
from lockstep.cli.options import JSON, SET, WEIGHTS
from lockstep.errors import ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import visible

FORMS = ("safetensors", "hf", "torch-export", "onnx")


@click.command(epilog=examples("lockstep export runs/digits-20260101-120000 --best --to onnx --out digits.onnx"))
@RUN
@click.option("--to", type=click.Choice(FORMS), required=True, help="What to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new file; for hf, a new folder.")
@STEP
@BEST
@WEIGHTS
@click.option("--tolerance", type=click.FloatRange(min=0), default=1e-4, help="Largest relative difference (1e-4).")
@SET
@JSON
def export(
    run_dir: Path | Url,
    to: str,
    out: Path,
    step: int | None,
    best: bool,
    weights: str,
    tolerance: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the model of RUN in a form that other programs open: weights, a Hugging Face folder, a whole program.

    One process does it, whatever number of ranks wrote the checkpoint. What was written is loaded back, and what it
    computes for an example is compared with what the model computes: only then it gets its name.
    """
    from lockstep.distributed.topology import launched
    from lockstep.launchers import after
    from lockstep.launchers.resume import Wanted

    if launched(os.environ):
        raise ConfigError("lockstep export is done by one process: run it by itself, not under a launcher")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already: name one that is not, or move it away")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}: make it, or name another one")
    folder = after.run_folder_of(run_dir)
    say_whose_code(folder)
    from lockstep.config.load import load

    config = load(folder / "config.yaml", overrides)
    chosen = after.chosen_step(folder, Wanted(step, best), config.checkpoint.keep.mode)
    from lockstep.tasks.export import export as write

    done = write(config, folder, chosen, to, out, tolerance, averages=weights == "ema")
    found = {
        "out": str(done.out),
        "to": to,
        "step": chosen,
        "weights": weights,
        "difference": done.difference,
        "compared": done.compared,
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    which = f"step {chosen}, averaged" if weights == "ema" else f"step {chosen}"
    click.echo(visible(f"{done.out}: {to} of {which}; {done.compared} compared, difference {done.difference:.3g}"))
