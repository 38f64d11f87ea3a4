"""`lockstep doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.help import examples
from lockstep.cli.options import JSON, OUT, SET
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.doctor.check import Check
    from lockstep.launchers.ssh.pod import Pod
    from lockstep.launchers.ssh.preflight import Inspection

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
    if hosts is not None:
        _of_hosts(context, hosts, overrides, as_json)
    if overrides:
        raise click.UsageError("--set changes the config of --hosts, which is not given")
    from lockstep.doctor import check as report
    from lockstep.doctor import examine

    asked = ["cuda" if name == "gpu" else name for name in runtimes]
    checks = []
    for check in examine(asked, processes, out, limit):
        checks.append(check)
        if not as_json:
            click.echo(report.text(check))
    click.echo(report.as_json(checks) if as_json else report.conclusion(checks))
    sys.exit(report.exit_code(checks))


def _of_hosts(context: click.Context, hosts: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """A table with a verdict per host; this machine is only where it is looked from."""
    from lockstep.doctor import check as report
    from lockstep.launchers.ssh import preflight

    for name, option in _OF_THIS_MACHINE.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} is about this machine, and --hosts looks at others: give one of them")
    inspections = _pod_of(hosts, overrides).inspect()
    checks = checks_of(inspections)
    code = report.exit_code(checks)
    if as_json:
        click.echo(report.as_json(checks))
    else:
        click.echo(preflight.table(inspections))
        click.echo(report.conclusion(checks) if code else "all hosts can take part")
    sys.exit(code)


def _pod_of(asked: str, overrides: tuple[str, ...]) -> Pod:
    """The hosts of a config file, or a list of names with commas between them."""
    from lockstep.config.load import load, load_python, with_overrides
    from lockstep.launchers.base import run_name
    from lockstep.launchers.ssh.pod import Pod

    file = Path(asked)
    if file.suffix in (".yaml", ".yml") or file.is_file():
        config = load(file, overrides)
        return Pod(config.name or run_name(file.stem), config)
    names = [each.strip() for each in asked.split(",") if each.strip()]
    # A config needs a task; this one is not imported.
    where = {"task": "lockstep:Task", "launch": {"type": "ssh", "hosts": names}}
    return Pod("doctor", with_overrides(load_python(where, {}, "--hosts"), overrides))


def checks_of(inspections: Sequence[Inspection]) -> list[Check]:
    """A check for every host."""
    from lockstep.doctor.check import Check

    checks = []
    for host in inspections:
        data = {key: value for key, value in host.found.items() if key != "code"}  # a digest for every file
        if host.reached:
            data["clock_seconds_ahead"] = host.clock
        found = "; ".join(host.problems) or f"can take part, at {host.found['address']}"
        checks.append(Check(host.name, "fail" if host.problems else "ok", found, data=data))
    return checks
