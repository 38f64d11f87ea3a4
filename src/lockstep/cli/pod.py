"""`lockstep pod`: hosts that are reached by SSH or gcloud, and the runs on them."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.common import DRY_RUN, OUT, SET, Group, examples, say
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.launchers.ssh.pod import Pod
    from lockstep.launchers.ssh.record import Record
    from lockstep.launchers.ssh.ssh import Command
    from lockstep.mirror.url import Url

CONFIG = click.option(
    "--config", "config", type=click.Path(path_type=Path), default=None, help="A config; the pod's own where not given."
)
WORKER = click.option("--worker", type=click.IntRange(min=0), default=None, help="One worker; all where not given.")
_EXEC_SECONDS = 24 * 3600.0


@click.group(cls=Group)
def pod() -> None:
    """Train on hosts that are reached by SSH, or on Cloud TPU pods by gcloud."""
    # A garbage collection at exit takes as long as a login.
    atexit.register(gc.freeze)


def _known(name: str, config: Path | None, overrides: Sequence[str] = ()) -> tuple[Pod, Record]:
    """Returns a pod by its name, with the given config or the one of its record."""
    from lockstep.config.load import load
    from lockstep.launchers.base import run_name
    from lockstep.launchers.ssh import record as records
    from lockstep.launchers.ssh.pod import Pod

    if config is None:
        record = records.read(name)
        return Pod(name, record.run_config()), record
    loaded = load(config, overrides)
    loaded = loaded.model_copy(update={"name": loaded.name or run_name(config.stem)})
    fresh = records.Record(name=name, config=records.plain(loaded))
    before = records.find(name)
    return Pod(name, loaded), before.model_copy(update={"config": fresh.config}) if before else fresh


def _print(commands: Sequence[Command]) -> None:
    for command in commands:
        click.echo(visible(command.render()))


@pod.command(
    epilog=examples(
        "lockstep pod create team --config config.yaml", "lockstep pod create team --config config.yaml --dry-run"
    )
)
@click.argument("name")
@CONFIG
@SET
@DRY_RUN
def create(name: str, config: Path | None, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Make the hosts of a pod, or check those that there are, and remember how to reach them."""
    from lockstep.launchers.ssh import record as records
    from lockstep.launchers.ssh.pod import NotAll, table

    made, record = _known(name, config, overrides)
    if dry_run:
        _print([*made.creating(), *made.inspecting()])
        return
    made.create()
    inspections = made.inspect()
    click.echo(table(inspections))
    if any(each.problems for each in inspections):
        raise NotAll("not all hosts can take part")
    records.write(record)


@pod.command(epilog=examples("lockstep pod push team"))
@click.argument("name")
@CONFIG
@DRY_RUN
def push(name: str, config: Path | None, dry_run: bool) -> None:
    """Bring the task's folder to all hosts."""
    from lockstep.launchers.ssh import record as records

    made, record = _known(name, config)
    if dry_run:
        made.pack()
        _print([*made.inspecting(make=True), *made.copying(), *made.asking("push")])
        return
    files = made.push()
    records.write(record)
    say(f"{files} files on {len(made.transport.workers)} hosts")


@pod.command(epilog=examples("lockstep pod run team --set train.epochs=3 --follow"))
@click.argument("name")
@CONFIG
@SET
@OUT
@click.option("--follow/--detach", "follow", default=False, help="Show what it says until it ends.")
@DRY_RUN
def run(
    name: str, config: Path | None, overrides: tuple[str, ...], out: Path | Url, follow: bool, dry_run: bool
) -> None:
    """Push, and start training on all hosts: it goes on when this command has ended."""
    from lockstep.launchers.ssh import launcher

    made, _ = _known(name, config, overrides)
    if dry_run:
        click.echo(visible(launcher.plan_pod(made.config, name)))
        return
    started = made.start(out)
    say(f"job {started.job} was started; run folder {made.transport.workers[0]}:{started.folder}")
    if follow:
        sys.exit(launcher.follow(made, started, stops=False))
    say(f"look at it: lockstep pod logs {name} --follow")


@pod.command(epilog=examples("lockstep pod logs team --follow"))
@click.argument("name")
@click.option("--follow", is_flag=True, help="Until the run ends; its exit code is the command's.")
@WORKER
@DRY_RUN
def logs(name: str, follow: bool, worker: int | None, dry_run: bool) -> None:
    """Show what the hosts said, with their names before it."""
    from lockstep.launchers.ssh import launcher

    made, record = _known(name, None)
    workers = range(len(made.transport.workers)) if worker is None else [made.worker(worker)]
    if dry_run:
        _print([each for at in workers for each in made.following(at, 0, record.job, follow)])
        return
    if follow and worker is None:
        sys.exit(launcher.follow(made, record, stops=False))
    for at in workers:
        launcher.show_console(made, record, at, follow)


@pod.command(name="exec", epilog=examples("lockstep pod exec team --worker 0 -- df -h"))
@click.argument("name")
@WORKER
@DRY_RUN
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(name: str, worker: int | None, dry_run: bool, command: tuple[str, ...]) -> None:
    """Run a command on all workers, or on one: `lockstep pod exec NAME -- COMMAND`; every argument arrives as it is."""
    from lockstep.launchers.ssh.gcloud import ONE_WORKER
    from lockstep.launchers.ssh.ssh import execute as carry_out

    made, _ = _known(name, None)
    commands = made.transport.run(command, None if worker is None else made.worker(worker))
    if worker is not None and len(made.transport.workers) > 1:
        say(ONE_WORKER)
    if dry_run:
        _print(commands)
        return
    codes = []
    for done in carry_out(commands, _EXEC_SECONDS):
        name = f"[{made.transport.workers[done.command.worker]}] " if done.command.worker is not None else ""
        for line in [*done.out.splitlines(), *done.errors.splitlines()]:
            click.echo(visible(f"{name}{line}"))
        codes.append(done.code)
    sys.exit(max(codes))


@pod.command(epilog=examples("lockstep pod ps team"))
@click.argument("name")
@DRY_RUN
def ps(name: str, dry_run: bool) -> None:
    """Say of every worker what runs there."""
    made, _ = _known(name, None)
    if dry_run:
        _print(made.asking("ps"))
        return
    for line in made.states():
        click.echo(visible(line))


@pod.command(epilog=examples("lockstep pod stop team"))
@click.argument("name")
@click.option("--now", is_flag=True, help="End it without waiting for a save, if it was asked to stop before.")
@DRY_RUN
def stop(name: str, now: bool, dry_run: bool) -> None:
    """Ask the run to save and leave; `lockstep pod resume` goes on from there."""
    made, record = _known(name, None)
    if dry_run:
        _print(made.stopping(0, record.job, now))
        return
    made.stop(record, at_once=now)
    say(f"asked job {record.job} to {'end' if now else 'save and leave'}; see: lockstep pod logs {name} --follow")


@pod.command(epilog=examples("lockstep pod pull team --out runs"))
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Where its folder is to be here.")
@DRY_RUN
def pull(name: str, out: Path, dry_run: bool) -> None:
    """Bring the newest run's folder here: checkpoints, metrics and the logs of all ranks."""
    made, record = _known(name, None)
    if dry_run:
        _print(made.pulling(record))
        return
    brought = made.pull(record, out)
    say(f"{len(brought)} files in {out / Path(record.folder or '').name}")


@pod.command(epilog=examples("lockstep pod resume team --set train.epochs=20"))
@click.argument("name")
@SET
@DRY_RUN
def resume(name: str, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Go on with the newest run from its newest checkpoint; hosts that are gone are made again where that can be."""
    from lockstep.config.load import with_values
    from lockstep.launchers.ssh import launcher
    from lockstep.launchers.ssh import record as records

    known = records.read(name)
    config = with_values(known.run_config(), {}, overrides)
    if dry_run:
        click.echo(visible(launcher.plan_pod(config, name, known.folder)))
        return
    sys.exit(launcher.resume_pod(name, config))


@pod.command(epilog=examples("lockstep pod delete team"))
@click.argument("name")
@CONFIG
@click.option("--yes", is_flag=True, help="Do not ask.")
@DRY_RUN
def delete(name: str, config: Path | None, yes: bool, dry_run: bool) -> None:
    """Give the hosts back, or remove the pod's folder from them: runs that were not pulled are lost."""
    from lockstep.launchers.ssh import record as records

    made, _ = _known(name, config)
    if dry_run:
        _print(made.deleting())
        return
    if not yes:
        click.confirm(f"Remove pod {name} from {', '.join(made.transport.workers)}, with its runs?", abort=True)
    made.delete()
    records.forget(name)
    say(f"pod {name} is gone")
