"""`lockstep doctor` and `lockstep verify`: whether this machine works, and whether all ways to train agree."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.common import JSON, OUT, SET, examples, say, say_whose_code
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.launchers.ssh.pod import Pod

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
    context: click.Context, runtimes: tuple[str, ...], processes: int | None, out: Path | Url, limit: float,
    hosts: str | None, overrides: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Say what is installed, what works on this machine, and what to do about what does not."""
    if hosts is not None:
        _check_hosts(context, hosts, overrides, as_json)
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
    sys.exit(int(report.overall(checks) == "fail"))


def _check_hosts(context: click.Context, hosts: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Prints a verdict per host, and exits."""
    from lockstep.doctor import check as report
    from lockstep.launchers.ssh.pod import table

    for name, option in _OF_THIS_MACHINE.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} is about this machine, and --hosts looks at others: give one of them")
    inspections = _pod_of(hosts, overrides).inspect()
    checks = []
    for host in inspections:
        found = "; ".join(host.problems) or f"can take part, at {host.found['address']}"
        checks.append(report.Check(host.name, "fail" if host.problems else "ok", found, data=host.found))
    code = int(report.overall(checks) == "fail")
    if as_json:
        click.echo(report.as_json(checks))
    else:
        click.echo(table(inspections))
        click.echo(report.conclusion(checks) if code else "all hosts can take part")
    sys.exit(code)


def _pod_of(asked: str, overrides: tuple[str, ...]) -> Pod:
    """Returns the hosts of a config file, or of a list of names with commas between them."""
    from lockstep.config.load import load, load_python, with_values
    from lockstep.launchers.base import run_name
    from lockstep.launchers.ssh.pod import Pod

    file = Path(asked)
    if file.suffix in (".yaml", ".yml") or file.is_file():
        config = load(file, overrides)
        return Pod(config.name or run_name(file.stem), config)
    names = [each.strip() for each in asked.split(",") if each.strip()]
    # A config needs a task; this one is not imported.
    where = {"task": "lockstep:Task", "launch": {"type": "ssh", "hosts": names}}
    return Pod("doctor", with_values(load_python(where, {}, "--hosts"), {}, overrides))


@click.command(
    epilog=examples(
        "lockstep verify config.yaml",
        "lockstep verify config.yaml --only 'cpu-*' --steps 3 --json",
        "lockstep verify parallel.py --mesh data=2,model=2",
    )
)
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG|FILE.py")
@click.option("--steps", type=click.IntRange(min=2), default=5, help="Steps to train on each (default: 5).")
@SET
@click.option("--only", multiple=True, metavar="NAME", help="Compare only these; cpu-* means all that begin so.")
@click.option("--require", multiple=True, metavar="NAME", help="Fail where one of these is not here.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=None, help="Largest relative difference allowed.")
@click.option("--limit", type=click.FloatRange(min=1), default=300.0, help="Seconds that any one run may take.")
@click.option("--no-resume", is_flag=True, help="Leave out going on from each other's checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Keep the runs in this new folder.")
@click.option("--json", "form", flag_value="json", help="Print a JSON object.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table in Markdown.")
@click.option("--mesh", metavar="AXIS=N,...", help="FILE.py: the mesh that parallelize is given (default: data=2).")
@click.option("--processes", type=click.IntRange(min=2), default=None, help="FILE.py: the mesh data=N.")
@click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16"]), help="FILE.py (default: float64).")
def verify(
    config: Path, steps: int, overrides: tuple[str, ...], only: tuple[str, ...], require: tuple[str, ...],
    tolerance: float | None, limit: float, no_resume: bool, out: Path | None, form: str | None,
    mesh: str | None, processes: int | None, dtype: str | None,
) -> None:  # fmt: skip
    """Train CONFIG for a few steps in every way that works here, and say whether all give the same losses.

    Or compare what the parallelize function of FILE.py makes of its model with the model itself (docs/parity.md).
    """
    from lockstep.distributed.topology import launched
    from lockstep.verify import report
    from lockstep.verify.examine import examine, work_folder
    from lockstep.verify.report import Asked

    if launched(os.environ):
        raise ConfigError("lockstep verify starts all processes itself: run it by itself, not under a launcher")
    say_whose_code(config)
    is_program = config.suffix == ".py"
    of_configs = {"--set": overrides, "--only": only, "--require": require, "--no-resume": no_resume, "--out": out}
    of_programs = {"--mesh": mesh, "--processes": processes, "--dtype": dtype}
    if wrong := [option for option, given in (of_configs if is_program else of_programs).items() if given]:
        raise click.UsageError(f"{wrong[0]} is for a {'config' if is_program else 'FILE.py'}, and not for {config}")
    if is_program:
        from lockstep.verify.parity import ParityCase, check, parse_mesh

        case = ParityCase(config, parse_mesh(mesh, processes), steps, dtype or "float64", tolerance)
        (parity,) = check([case], limit)
        click.echo(visible(parity.as_json() if form == "json" else str(parity)))
        sys.exit(0 if parity.agrees else 1)
    asked = Asked(config, steps, overrides, only, require, tolerance, limit, not no_resume)
    try:
        with work_folder(out) as (folder, ending):
            found = examine(asked, folder, say)
            if not found.agrees:
                ending.pop_all()
    except KeyboardInterrupt:
        say("asked to stop: the run under way was ended")
        sys.exit(INTERRUPTED_EXIT_CODE)
    shown = {"json": report.as_json, "markdown": report.markdown}.get(form or "", report.text)(found)
    click.echo(visible(shown))
    if form != "json":
        click.echo(f"\n{report.conclusion(found)}")
    if folder.exists():
        say(f"the runs are in {folder}")
    sys.exit(0 if found.agrees else 1)
