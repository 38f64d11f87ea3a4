"""The command line. Nothing here imports torch before it is needed: help and a config error answer at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli import starting
from lockstep.cli.starting import say
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig


class _Commands(click.Group):
    """Turns our errors into a message and an exit code: a user never sees a bare traceback for a mistake."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except LockstepError as error:
            say(str(error))
            sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lockstep-train", prog_name="lockstep")
def main() -> None:
    """Train PyTorch models with every device in step."""


_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a config value; VALUE is YAML."
)
_PROFILE = click.option("--profile", is_flag=True, help="Write a trace of a few steps; short for profile.enabled=true.")
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@_SET
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are made.")
@click.option("--sweep", type=click.Path(path_type=Path), help="Train with the values of a sweep, on Ray.")
@_PROFILE
@_DRY_RUN
def train(
    config: Path, overrides: tuple[str, ...], out: Path, sweep: Path | None, profile: bool, dry_run: bool
) -> None:
    """Train what CONFIG describes."""
    from lockstep.config.load import load
    from lockstep.distributed.topology import launched
    from lockstep.record import run_folder

    loaded = load(config, _with_profile(overrides, profile))
    loaded = loaded.model_copy(update={"name": loaded.name or starting.name_after(config)})
    if sweep is not None:
        starting.sweep(loaded, sweep, out, dry_run)
        return
    if launched(os.environ):
        sys.exit(starting.train_as_rank(loaded, lambda: starting.new_folder(out, "--out", loaded)))
    if loaded.launch.type == "ray":
        storage = loaded.launch.ray.storage
        where = (Path(storage), "launch.ray.storage") if storage else (out, "--out")
        if not dry_run:
            run_folder.require_folder(*where)
        starting.train_on_ray(loaded, lambda resolved: starting.new_folder(*where, resolved), dry_run)
        return
    loaded = starting.resolved(loaded)
    plan = starting.training_plan(loaded, "RUN_DIR" if dry_run else "")
    if dry_run:
        starting.print_plan(loaded, plan)
        return
    starting.warm_up(plan)
    folder = run_folder.create(out, str(loaded.name))
    run_folder.write_config(folder, loaded)
    starting.train(folder, loaded)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@_SET
@_PROFILE
@_DRY_RUN
def resume(run_dir: Path, overrides: tuple[str, ...], profile: bool, dry_run: bool) -> None:
    """Go on with the run in RUN_DIR from its newest good checkpoint."""
    from lockstep.config.changes import changes, refuse_wrong_changes
    from lockstep.config.load import load
    from lockstep.distributed.topology import launched
    from lockstep.launcher import script
    from lockstep.record import run_folder

    again = script.start_again(run_dir, os.environ, {"--set": overrides, "--profile": profile})
    if again is not None:
        click.echo(again.render()) if dry_run else again.become()
        return
    before = run_folder.read_plain_config(run_dir)
    loaded = load(run_dir / run_folder.CONFIG_FILE, _with_profile(overrides, profile))

    def changed(resolved: RunConfig) -> Path:
        found = changes(before, resolved.plain())
        refuse_wrong_changes(found)
        if not dry_run:
            with run_folder.locked(run_dir):
                run_folder.write_config(run_dir, resolved)
            for change in found:
                say(f"changed: {change}")
        return run_dir

    if launched(os.environ):
        refuse_wrong_changes(changes(before, loaded.plain()))
        sys.exit(starting.train_as_rank(loaded, lambda: run_dir))
    if loaded.launch.type == "ray":
        starting.train_on_ray(loaded, changed, dry_run)
        return
    loaded = starting.resolved(loaded)
    plan = starting.training_plan(loaded, str(run_dir))
    changed(loaded)
    if dry_run:
        starting.print_plan(loaded, plan)
        return
    starting.warm_up(plan)
    starting.train(run_dir, loaded)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--processes", type=click.IntRange(min=1), default=None, help="Processes on this host (default: one per GPU, or 1)."
)
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port to meet at (default: a free one).")
@click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Restarts after a failure.")
@click.option("--fresh", is_flag=True, help="Start new interpreters instead of forking a server that has torch loaded.")
@_DRY_RUN
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    processes: int | None,
    port: int | None,
    max_restarts: int,
    fresh: bool,
    dry_run: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT with the variables that torchrun sets, so that a DDP script runs unchanged."""
    from lockstep import runtime
    from lockstep.config.schema import RunSettings
    from lockstep.errors import ConfigError
    from lockstep.launcher import local
    from lockstep.launcher.plan import local_plan

    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    count = processes or runtime.resolve(RunSettings())[1]
    plan = local_plan([sys.executable, str(script), *args], count, port=port)
    if dry_run:
        click.echo(plan.render())
        return
    result = local.launch(plan, max_restarts=max_restarts, fresh=fresh)
    if result.failure is not None:
        say(result.failure.render(count))
    sys.exit(result.exit_code)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
def init(folder: Path) -> None:
    """Write a task and a config to start from into FOLDER."""
    from lockstep.errors import ConfigError

    templates = Path(__file__).parents[1] / "templates"
    files = {"task.py": templates / "task.py.txt", "config.yaml": templates / "config.yaml"}
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder / present[0]} is there already; name another folder: lockstep init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in files.items():
            (folder / name).write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    say(f"wrote {folder / 'task.py'} and {folder / 'config.yaml'}; next: lockstep train {folder / 'config.yaml'}")


@main.command()
@click.option("--runtime", "runtimes", multiple=True, type=click.Choice(["cpu", "cuda", "xla"]), help="Must work here.")
@click.option("--processes", type=click.IntRange(min=1), default=None, help="Start so many and measure how they talk.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are to be made.")
@click.option("--limit", type=click.FloatRange(min=1), default=60.0, help="Seconds that any one wait may take.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def doctor(runtimes: tuple[str, ...], processes: int | None, out: Path, limit: float, as_json: bool) -> None:
    """Say what is installed, what works on this machine, and what to do about what does not."""
    from lockstep.doctor import report
    from lockstep.doctor.check import exit_code, overall
    from lockstep.doctor.examine import examine

    checks = []
    for check in examine(runtimes, processes, out, limit):
        checks.append(check)
        if not as_json:
            click.echo(report.text(check))
    click.echo(report.as_json(checks) if as_json else report.conclusion(checks))
    sys.exit(exit_code(overall(checks)))


@main.group()
def profile() -> None:
    """Look at traces of a run."""


@profile.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", help="Where TensorBoard listens (default: this machine alone).")
@click.option("--port", type=click.IntRange(0, 65535), default=6006, help="Its port; 0 picks a free one.")
def view(run_dir: Path, host: str, port: int) -> None:
    """Open the traces of the run in RUN_DIR in TensorBoard."""
    from lockstep.profiler import view

    traces, command = view.prepare(run_dir, host, port)
    say(f"{len(traces)} trace{'s' if len(traces) > 1 else ''}; choose PROFILE, then Trace Viewer under Tools")
    for trace in traces:
        say(f"  {trace}")
    sys.stdout.flush()
    os.execv(command[0], command)  # so that Ctrl-C is TensorBoard's


@profile.command()
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@click.option("--seconds", type=click.FloatRange(min=0.01, max=30), default=1.0, help="How long the trace is to be.")
def capture(addresses: tuple[str, ...], seconds: float) -> None:
    """Take a trace of ranks that are training with a profile section, at 127.0.0.1:9012 where no ADDRESS is given."""
    from lockstep.errors import ConfigError
    from lockstep.profiler.demand import capture

    failures = capture(addresses or ("127.0.0.1:9012",), seconds)
    if failures:
        raise ConfigError("\n".join(f"{address}: no profile was taken: {why}" for address, why in failures.items()))
    say("written into profile/proc_N of the run's folder; look at it with: lockstep profile view RUN_DIR")


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=2), default=5, help="Steps to train on each (default: 5).")
@_SET
@click.option("--only", multiple=True, metavar="NAME", help="Compare only these; cpu-* means all that begin so.")
@click.option("--require", multiple=True, metavar="NAME", help="Fail where one of these is not here.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=None, help="Largest relative difference allowed.")
@click.option("--limit", type=click.FloatRange(min=1), default=300.0, help="Seconds that any one run may take.")
@click.option("--no-resume", is_flag=True, help="Leave out going on from each other's checkpoints.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Keep the runs in this new folder.")
@click.option("--json", "form", flag_value="json", help="Print a JSON object.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table in Markdown.")
def verify(
    config: Path,
    steps: int,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    require: tuple[str, ...],
    tolerance: float | None,
    limit: float,
    no_resume: bool,
    out: Path | None,
    form: str | None,
) -> None:
    """Train CONFIG for a few steps in every way that works here, and say whether all give the same losses."""
    from lockstep.distributed.topology import launched
    from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError
    from lockstep.verify import report, work
    from lockstep.verify.examine import examine
    from lockstep.verify.findings import Asked

    if launched(os.environ):
        raise ConfigError("lockstep verify starts all processes itself: run it by itself, not under a launcher")
    asked = Asked(config, steps, overrides, only, require, tolerance, limit, not no_resume)
    try:
        with work.folder(out) as place:
            found = examine(asked, place.path, say)
            place.keep = place.keep or not found.agrees
    except KeyboardInterrupt:
        say("asked to stop: the run under way was ended")
        sys.exit(INTERRUPTED_EXIT_CODE)
    shown = {"json": report.as_json, "markdown": report.markdown}.get(form or "", report.text)(found)
    click.echo(shown)
    if form != "json":
        click.echo(f"\n{report.conclusion(found)}")
    if place.keep:
        say(f"the runs are in {place.path}")
    sys.exit(0 if found.agrees else 1)


@main.command()
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from lockstep.config.schema import RunConfig

    click.echo(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2))


def _with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides
