"""`lockstep doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lockstep.cli.help import examples
from lockstep.cli.options import JSON, OUT, SET
from lockstep.mirror.url import Url

_OF_THIS_MACHINE = {"runtimes": "--runtime", "processes": "--processes", "out": "--out", "limit": "--limit"}


@click.command(
    epilog=examples(
        "lockstep doctor",
        "lockstep doctor --runtime cuda --processes 4",
        "lockstep doctor --hosts anna,bert --json",
    )
)
@click.option(
    "--runtime", "runtimes", multiple=True, type=click.Choice(["cpu", "cuda", "gpu", "xla"]), help="Must work here."
)
@click.option("--processes", type=click.IntRange(min=1), default=None, help="Start so many and measure how they talk.")
@OUT
@click.option("--limit", type=click.FloatRange(min=1), default=60.0, help="Seconds that any one wait may take.")
@click.option(
    "--hosts", metavar="CONFIG|A,B,C", help="Look at these hosts instead, by SSH: those of a config, or of a list."
)
@SET
@JSON
@click.pass_context
def doctor(
    context: click.Context,
    runtimes: tuple[str, ...],
    processes: int | None,
    out: Path | Url,
    limit: float,
    hosts: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what is installed, what works on this machine, and what to do about what does not."""
    from lockstep.doctor import report
    from lockstep.doctor.check import exit_code, overall

    if hosts is not None:
        _of_hosts(context, hosts, overrides, as_json)
    if overrides:
        raise click.UsageError("--set changes the config of --hosts, which is not given")
    from lockstep.doctor.examine import examine

    asked = ["cuda" if name == "gpu" else name for name in runtimes]
    checks = []
    for check in examine(asked, processes, out, limit):
        checks.append(check)
        if not as_json:
            click.echo(report.text(check))
    click.echo(report.as_json(checks) if as_json else report.conclusion(checks))
    sys.exit(exit_code(overall(checks)))


def _of_hosts(context: click.Context, hosts: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """A table with a verdict per host; this machine is only where it is looked from."""
    from lockstep.doctor import hosts as looking
    from lockstep.doctor import report
    from lockstep.doctor.check import exit_code, overall
    from lockstep.pod import preflight

    for name, option in _OF_THIS_MACHINE.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} is about this machine, and --hosts looks at others: give one of them")
    inspections = looking.pod_of(hosts, overrides).inspect()
    checks = looking.checks(inspections)
    code = exit_code(overall(checks))
    if as_json:
        click.echo(report.as_json(checks))
    else:
        click.echo(preflight.table(inspections))
        click.echo(report.conclusion(checks) if code else "all hosts can take part")
    sys.exit(code)
