"""`lockstep train` and `lockstep resume`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.common import (
    DRY_RUN,
    OUT,
    PROFILE,
    RUN_DIR,
    SET,
    examples,
    leaving_at_once,
    say,
    say_whose_code,
    saying_what_is_logged,
    with_profile,
)
from lockstep.cli.ending import conclude, saved_before
from lockstep.errors import ConfigError
from lockstep.launchers import batch_tasks, checking, cluster, fitting, restore_point, resuming
from lockstep.launchers import folder as folders
from lockstep.launchers.local import local
from lockstep.launchers.slurm import queue
from lockstep.mirror.url import Url
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.config.sweep import Sweep


@click.command(
    epilog=examples(
        "lockstep train config.yaml",
        "lockstep train config.yaml --set train.epochs=3 --set optimizer.lr=1e-3 --out runs",
        "lockstep train config.yaml --set launch=ray --sweep sweep.yaml",
        "lockstep train config.yaml --dry-run",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@SET
@OUT
@click.option("--sweep", type=click.Path(path_type=Path), help="Train with the values of a sweep, on Ray or SLURM.")
@click.option("--pod", "pod_name", metavar="NAME", help="On the hosts of a pod: push, start and follow.")
@PROFILE
@DRY_RUN
@leaving_at_once
def train(
    config: Path, overrides: tuple[str, ...], out: Path | Url, sweep: Path | None, pod_name: str | None, profile: bool,
    dry_run: bool,
) -> None:  # fmt: skip
    """Train what CONFIG describes."""
    from lockstep.config.load import load

    loaded = load(config, with_profile(overrides, profile))
    loaded = loaded.model_copy(update={"name": loaded.name or folders.named(config.stem)})
    if sweep is not None:
        _sweep(loaded, sweep, out, dry_run)
        return
    if batch_tasks.trains_here(loaded, os.environ) and not dry_run:
        sys.exit(local.train_as_rank(loaded, lambda: folders.new(out, "--out", loaded)))
    if pod_name is not None or loaded.launch.type == "ssh":
        _on_pod(loaded, pod_name or str(loaded.name), out, dry_run)
        return
    if dry_run:
        _dry_run(loaded, "RUN_DIR", out)
        return
    if loaded.launch.type != "local":
        fitting.not_checked(loaded, f"with launch: {loaded.launch.type}", say)
    if loaded.launch.type == "slurm":
        _tell_queued(queue.train(loaded, _on_disk(out)))
        return
    from lockstep.mirror.mark import mirrored
    from lockstep.record import folder_lock

    if loaded.launch.type == "ray":
        new = folders.on_ray(loaded, out, make_parent=True)
        with contextlib.ExitStack() as mirroring:
            mirrors = []

            def make_folder(resolved: RunConfig) -> Path:
                made = new(resolved)
                mirrors.append(mirroring.enter_context(mirrored(made, resolved, say)))
                return made

            ended = cluster.train(loaded, make_folder)
            conclude(ended.folder, ended.result, ended.config, mirrors[0])
    folders.require_bucket(out, "--out")
    loaded = local.resolved(loaded, say)
    folders.require_place(out, "--out")
    local.check(loaded)
    folder = folders.new(out, "--out", loaded)
    with saying_what_is_logged(), folder_lock.locked(folder), mirrored(folder, loaded, say) as mirror:
        fitting.check(loaded, folder, say)
        conclude(folder, local.train(folder, loaded, say), loaded, mirror)


@click.command(
    epilog=examples(
        "lockstep resume runs/digits-20260101-120000",
        "lockstep resume runs/digits-20260101-120000 --best --set train.epochs=20",
    )
)
@RUN_DIR
@click.option("--step", type=click.IntRange(min=0), default=None, help="Go on from the checkpoint of this step.")
@click.option("--best", is_flag=True, help="Go on from the best checkpoint, by checkpoint.keep.")
@SET
@PROFILE
@DRY_RUN
@leaving_at_once
def resume(
    run_dir: Path | Url, step: int | None, best: bool, overrides: tuple[str, ...], profile: bool, dry_run: bool
) -> None:
    """Go on with the run in RUN_DIR, a folder or its URL, from its newest good checkpoint, or from another one.

    Checkpoints that are newer than a chosen one are set aside under another name.
    """
    from lockstep.config.changes import changes, described, refuse_wrong_changes
    from lockstep.config.load import load
    from lockstep.distributed.topology import Topology, launched
    from lockstep.mirror.mark import mirrored
    from lockstep.record import folder_lock, run_folder

    wanted = restore_point.Wanted(step, best)
    topology = Topology.from_env(os.environ) if launched(os.environ) and not dry_run else None
    say_whose_code(run_dir)
    with contextlib.ExitStack() as finding:
        with saying_what_is_logged() if topology is None else contextlib.nullcontext():
            run = finding.enter_context(resuming.found(run_dir, wanted, topology, dry_run))
        if _start_script_again(run.start_files, wanted, {"--set": overrides, "--profile": profile}, dry_run):
            return
        before = run_folder.read_config(run.start_files).plain()
        loaded = load(run.start_files / run_folder.CONFIG_FILE, with_profile(overrides, profile))
        differing = changes(before, loaded.plain())
        refuse_wrong_changes(differing, loaded.plain())

        def go_back(folder: Path, first: bool = True) -> None:
            if first:
                restore_point.forget(folder)
            if not wanted.is_newest and not restore_point.has_gone_back(folder):
                with saying_what_is_logged():
                    say(f"going on from step {restore_point.go_back(folder, wanted, loaded.checkpoint.keep.mode)}")

        def changed(resolved: RunConfig) -> Path:
            go_back(folder)
            run_folder.write_config(folder, resolved)
            for change in changes(before, resolved.plain()):
                say(f"changed: {described(change)}")
            return folder

        if batch_tasks.trains_here(loaded, os.environ) and not dry_run:
            first = Topology.from_env(os.environ).attempt == 0
            # On rank 0, for all, once they have met and it holds the folder.
            with saved_before(run.start_files):
                sys.exit(local.train_as_rank(loaded, run.folder, prepare=lambda folder: go_back(folder, first)))
        if dry_run:
            _dry_run(loaded, str(run_dir))
            if not wanted.is_newest:
                folder = run.folder()
                chosen = restore_point.found(folder, wanted, loaded.checkpoint.keep.mode)
                aside = ", ".join(restore_point.newer(folder, chosen)) or "none"
                click.echo(f"from step {chosen}; to be set aside: {aside}")
            return
        folder = run.folder()
        restore_point.refuse_less(folder, wanted, differing, loaded.checkpoint.keep.mode)
        if loaded.launch.type != "local":
            fitting.not_checked(loaded, f"with launch: {loaded.launch.type}", say)
        if loaded.launch.type == "slurm":
            loaded = queue.resolved(loaded)
            checking.check(loaded)
            with folder_lock.locked(folder):  # until the job may have it
                changed(loaded)
            _tell_queued(queue.resume(loaded, folder))
            return
        with saying_what_is_logged(), folder_lock.locked(folder), mirrored(folder, loaded, say) as mirror:
            if loaded.launch.type == "ray":
                ended = cluster.train(loaded, changed, held=True)
                conclude(ended.folder, ended.result, ended.config, mirror)
            loaded = local.resolved(loaded, say)
            local.check(loaded)
            changed(loaded)
            fitting.check(loaded, folder, say)
            conclude(folder, local.train(folder, loaded, say), loaded, mirror)


def _on_pod(config: RunConfig, name: str, out: Path | Url, dry_run: bool) -> None:
    from lockstep.launchers.ssh import pod

    if dry_run:
        _print(config, pod.described(config, name))
        return
    sys.exit(pod.train(config, name, out))


def _start_script_again(run_dir: Path, wanted: restore_point.Wanted, options: dict[str, Any], dry_run: bool) -> bool:
    """Replaces this process by the script where the folder is that of a script with its own loop."""
    from lockstep.launchers import script

    again = script.start_again(run_dir, os.environ, options)
    if again is None:
        return False
    if dry_run:
        click.echo(visible(again.render()))
        return True
    if not wanted.is_newest:
        known = script.read(run_dir)
        keep = known.settings.get("checkpoint", {}).get("keep", {}) if known else {}
        from lockstep.record import folder_lock

        with folder_lock.locked(run_dir), saying_what_is_logged():
            say(f"going on from step {restore_point.go_back(run_dir, wanted, keep.get('mode', 'min'))}")
    again.become()
    return True


def _on_disk(out: Path | Url) -> Path:
    """Refuses a URL: the nodes of a SLURM job read its script and its run from a shared folder."""
    if isinstance(out, Url):
        raise ConfigError(f"--out {out}: launch: slurm needs a folder that this machine and the nodes share")
    return out


def _tell_queued(queued: queue.Queued) -> None:
    say(queued.render())
    click.echo(queued.number)  # for a script that goes on with it


def _dry_run(config: RunConfig, folder: str, out: Path | Url = Path()) -> None:
    """Prints what would be started, after the checks that need the task's module."""
    from lockstep.distributed.topology import Topology, launched
    from lockstep.tasks.config_checks import ELSEWHERE, check_made, check_parts

    if launched(os.environ):
        batch_tasks.check_processes(config, os.environ)
        topology = Topology.from_env(os.environ)
        config = config.model_copy(update={"processes": topology.local_world_size})
        plan = f"under the launcher that started this process: {topology.world_size} ranks"
        if topology.place.rank != 0:
            return
    elif config.launch.type == "ray":
        plan = cluster.described(config)
    elif batch_tasks.is_to_be_submitted(config, os.environ):
        plan, config = queue.described(config, _on_disk(out) / folder), queue.resolved(config)
    else:
        config = local.resolved(config, say)
        plan = local.plan(config, folder).render()
    here = not (config.launch.type == "ray" and cluster.is_elsewhere(config))
    check_parts(config, () if here else ELSEWHERE)
    if here:
        check_made(config)
    _print(config, plan)


def _sweep(config: RunConfig, file: Path, out: Path | Url, dry_run: bool) -> None:
    from lockstep.config.load import to_yaml
    from lockstep.config.sweep import load_sweep
    from lockstep.mirror.url import is_url
    from lockstep.ray.installed import require_answer, require_train_v2
    from lockstep.record import run_folder
    from lockstep.record.trials import write_sweep

    storage = config.launch.ray.storage
    if isinstance(out, Url) or is_url(storage or ""):
        setting, named = ("launch.ray.storage", storage) if is_url(storage or "") else ("--out", out)
        raise ConfigError(
            f"{setting} {named}: a sweep writes its trials from many nodes at once, into one folder that they share; "
            "name a folder on a disk. A single run can be kept in a bucket"
        )
    sweep = load_sweep(file, config)
    fitting.not_checked(config, "for the trials of a sweep", say)
    if config.launch.type == "slurm":
        _sweep_in_queue(config, sweep, out, dry_run)
        return
    if dry_run:
        from lockstep.tasks.config_checks import ELSEWHERE, check_parts

        check_parts(config, ELSEWHERE if cluster.is_elsewhere(config) else ())
        _print(config, to_yaml(sweep.model_dump(mode="json")))
        return
    require_train_v2()
    require_answer(config.launch.ray)
    from lockstep.ray.tune import sweep_over

    folder = run_folder.create(Path(storage) if storage else out, f"{config.name}-sweep")
    write_sweep(folder, sweep)
    say(f"trials in {folder}")
    sys.exit(sweep_over(config, sweep, folder))


def _sweep_in_queue(config: RunConfig, sweep: Sweep, out: Path, dry_run: bool) -> None:
    if not dry_run:
        _tell_queued(queue.sweep(config, sweep, out))
        return
    from lockstep.tasks.config_checks import check_parts

    check_parts(config)
    _print(queue.resolved(config), queue.described_sweep(config, sweep, out / "SWEEP_DIR"))


def _print(config: RunConfig, plan: str) -> None:
    from lockstep.config.load import to_yaml

    click.echo(to_yaml(config.plain()))
    click.echo(visible(plan))
