"""`lockstep doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--runtime", "runtimes", multiple=True, type=click.Choice(["cpu", "cuda", "gpu", "xla"]), help="Must work here."
)
@click.option("--processes", type=click.IntRange(min=1), default=None, help="Start so many and measure how they talk.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are to be made.")
@click.option("--limit", type=click.FloatRange(min=1), default=60.0, help="Seconds that any one wait may take.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def doctor(runtimes: tuple[str, ...], processes: int | None, out: Path, limit: float, as_json: bool) -> None:
    """Say what is installed, what works on this machine, and what to do about what does not."""
    from lockstep.doctor import report
    from lockstep.doctor.check import exit_code, overall
    from lockstep.doctor.examine import examine

    asked = ["cuda" if name == "gpu" else name for name in runtimes]
    checks = []
    for check in examine(asked, processes, out, limit):
        checks.append(check)
        if not as_json:
            click.echo(report.text(check))
    click.echo(report.as_json(checks) if as_json else report.conclusion(checks))
    sys.exit(exit_code(overall(checks)))
