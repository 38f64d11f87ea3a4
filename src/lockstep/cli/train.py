"""`lockstep train` and `lockstep resume`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.ending import conclude, saved_before
from lockstep.cli.interrupt import leaving_at_once
from lockstep.cli.messages import say, saying_what_is_logged
from lockstep.cli.options import DRY_RUN, OUT, PROFILE, SET, with_profile
from lockstep.shown import visible
from lockstep.start import checkpoint, cluster, local, queue, tasks
from lockstep.start import folder as folders

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.config.sweep import Sweep


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@SET
@OUT
@click.option("--sweep", type=click.Path(path_type=Path), help="Train with the values of a sweep, on Ray or SLURM.")
@PROFILE
@DRY_RUN
@leaving_at_once
def train(
    config: Path, overrides: tuple[str, ...], out: Path, sweep: Path | None, profile: bool, dry_run: bool
) -> None:
    """Train what CONFIG describes."""
    from lockstep.config.load import load

    loaded = load(config, with_profile(overrides, profile))
    loaded = loaded.model_copy(update={"name": loaded.name or folders.named(config.stem)})
    if sweep is not None:
        _sweep(loaded, sweep, out, dry_run)
        return
    if tasks.trains_here(loaded, os.environ) and not dry_run:
        sys.exit(local.train_as_rank(loaded, lambda: folders.new(out, "--out", loaded)))
    if dry_run:
        _dry_run(loaded, "RUN_DIR", out)
        return
    if loaded.launch.type == "slurm":
        _tell_queued(queue.train(loaded, out))
        return
    if loaded.launch.type == "ray":
        ended = cluster.train(loaded, folders.on_ray(loaded, out, make_parent=True))
        conclude(ended.folder, ended.result, ended.config)
    loaded = local.resolved(loaded, say)
    plan = local.plan(loaded, "")
    local.warm_up(plan)
    folder = folders.new(out, "--out", loaded)
    from lockstep.record import folder_lock

    with folder_lock.locked(folder):
        conclude(folder, local.train(folder, loaded, say), loaded)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), default=None, help="Go on from the checkpoint of this step.")
@click.option("--best", is_flag=True, help="Go on from the best checkpoint, by checkpoint.keep.")
@SET
@PROFILE
@DRY_RUN
@leaving_at_once
def resume(
    run_dir: Path, step: int | None, best: bool, overrides: tuple[str, ...], profile: bool, dry_run: bool
) -> None:
    """Go on with the run in RUN_DIR from its newest good checkpoint, or from another one.

    Checkpoints that are newer than a chosen one are set aside under another name.
    """
    from lockstep.config.changes import changes, described, refuse_wrong_changes
    from lockstep.config.load import load
    from lockstep.distributed.topology import Topology
    from lockstep.record import folder_lock, run_folder

    wanted = checkpoint.Wanted(step, best)
    if _start_script_again(run_dir, wanted, {"--set": overrides, "--profile": profile}, dry_run):
        return
    before = run_folder.read_plain_config(run_dir)
    loaded = load(run_dir / run_folder.CONFIG_FILE, with_profile(overrides, profile))
    refuse_wrong_changes(changes(before, loaded.plain()), loaded.plain())

    def go_back(first: bool = True) -> None:
        if first:
            checkpoint.forget(run_dir)
        if not wanted.is_newest and not checkpoint.has_gone_back(run_dir):
            with saying_what_is_logged():
                say(f"going on from step {checkpoint.go_back(run_dir, wanted, loaded.checkpoint.keep.mode)}")

    def changed(resolved: RunConfig) -> Path:
        go_back()
        run_folder.write_config(run_dir, resolved)
        for change in changes(before, resolved.plain()):
            say(f"changed: {described(change)}")
        return run_dir

    if tasks.trains_here(loaded, os.environ) and not dry_run:
        first = Topology.from_env(os.environ).attempt == 0
        # On rank 0, for all, once they have met and it holds the folder.
        with saved_before(run_dir):
            sys.exit(local.train_as_rank(loaded, lambda: run_dir, prepare=lambda folder: go_back(first)))
    if dry_run:
        _dry_run(loaded, str(run_dir))
        if not wanted.is_newest:
            chosen = checkpoint.found(run_dir, wanted, loaded.checkpoint.keep.mode)
            click.echo(f"from step {chosen}; to be set aside: {', '.join(checkpoint.newer(run_dir, chosen)) or 'none'}")
        return
    if loaded.launch.type == "slurm":
        loaded = queue.resolved(loaded)
        with folder_lock.locked(run_dir):  # until the job may have it
            changed(loaded)
        _tell_queued(queue.resume(loaded, run_dir))
        return
    with folder_lock.locked(run_dir):
        if loaded.launch.type == "ray":
            ended = cluster.train(loaded, changed, held=True)
            conclude(ended.folder, ended.result, ended.config)
        loaded = local.resolved(loaded, say)
        changed(loaded)
        local.warm_up(local.plan(loaded, str(run_dir)))
        conclude(run_dir, local.train(run_dir, loaded, say), loaded)


def _start_script_again(run_dir: Path, wanted: checkpoint.Wanted, options: dict[str, Any], dry_run: bool) -> bool:
    """Where the folder is that of a script with its own loop, this process becomes that script."""
    from lockstep.launcher import script

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
            say(f"going on from step {checkpoint.go_back(run_dir, wanted, keep.get('mode', 'min'))}")
    again.become()
    return True


def _tell_queued(queued: queue.Queued) -> None:
    say(queued.render())
    click.echo(queued.number)  # for a script that goes on with it


def _dry_run(config: RunConfig, folder: str, out: Path = Path()) -> None:
    """Say what would be started, and what an import can tell of the config: a dry run may take its time."""
    from lockstep.distributed.topology import Topology, launched
    from lockstep.train.parts import check_parts

    if launched(os.environ):
        tasks.check_processes(config, os.environ)
        topology = Topology.from_env(os.environ)
        config = config.model_copy(update={"processes": topology.local_world_size})
        plan = f"under the launcher that started this process: {topology.world_size} ranks"
        if topology.place.rank != 0:
            return
    elif config.launch.type == "ray":
        plan = cluster.described(config)
    elif tasks.is_to_be_submitted(config, os.environ):
        plan, config = queue.described(config, out / folder), queue.resolved(config)
    else:
        config = local.resolved(config, say)
        plan = local.plan(config, folder).render()
    check_parts(config, trained_here=not (config.launch.type == "ray" and cluster.is_elsewhere(config)))
    _print(config, plan)


def _sweep(config: RunConfig, file: Path, out: Path, dry_run: bool) -> None:
    from lockstep.config.load import to_yaml
    from lockstep.config.sweep import load_sweep
    from lockstep.ray.address import require_answer
    from lockstep.ray.installed import require_train_v2
    from lockstep.record import run_folder
    from lockstep.record.trials import write_sweep

    sweep = load_sweep(file, config)
    if config.launch.type == "slurm":
        _sweep_in_queue(config, sweep, out, dry_run)
        return
    if dry_run:
        from lockstep.train.parts import check_parts

        check_parts(config, trained_here=not cluster.is_elsewhere(config))
        _print(config, to_yaml(sweep.model_dump(mode="json")))
        return
    require_train_v2()
    require_answer(config.launch.ray)
    from lockstep.ray.tune import sweep_over

    storage = config.launch.ray.storage
    folder = run_folder.create(Path(storage) if storage else out, f"{config.name}-sweep")
    write_sweep(folder, sweep)
    say(f"trials in {folder}")
    sys.exit(sweep_over(config, sweep, folder))


def _sweep_in_queue(config: RunConfig, sweep: Sweep, out: Path, dry_run: bool) -> None:
    if not dry_run:
        _tell_queued(queue.sweep(config, sweep, out))
        return
    from lockstep.train.parts import check_parts

    check_parts(config)
    _print(queue.resolved(config), queue.described_sweep(config, sweep, out / "SWEEP_DIR"))


def _print(config: RunConfig, plan: str) -> None:
    from lockstep.config.load import to_yaml

    click.echo(to_yaml(config.plain()))
    click.echo(visible(plan))
