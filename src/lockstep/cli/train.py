"""`lockstep train` and `lockstep resume`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
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
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ConfigError
from lockstep.launchers import resume as resuming
from lockstep.launchers.base import Ended, Launcher, Out, launcher_of, run_name, trains_here
from lockstep.launchers.resume import Wanted
from lockstep.mirror.url import Url
from lockstep.shown import visible

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

_COUNT = click.IntRange(min=1)


@click.command(
    epilog=examples(
        "lockstep train config.yaml",
        "lockstep train config.yaml --fast",
        "lockstep train config.yaml --set train.epochs=3 --set optimizer.lr=1e-3 --out runs",
        "lockstep train config.yaml --set launch=ray --sweep sweep.yaml",
        "lockstep train config.yaml --dry-run",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@SET
@OUT
@click.option("--sweep", type=click.Path(path_type=Path), help="Train with the values of a sweep, here or on Ray.")
@click.option(
    "--at-once", type=_COUNT, help="How many trials of a sweep run at once; else as many as there is room for."
)
@click.option("--fast", is_flag=True, help="Try all of it in seconds: a step, a validation batch, a save, a resume.")
@click.option("--overfit", type=_COUNT, help="Train and validate on the first N examples; short for train.overfit=N.")
@click.option("--limit-train", type=_COUNT, help="Train on the first N examples; short for train.limit=N.")
@click.option("--limit-val", type=_COUNT, help="Validate on the first N examples; short for validate.limit=N.")
@click.option("--pod", "pod_name", metavar="NAME", help="On the hosts of a pod: push, start and follow.")
@PROFILE
@DRY_RUN
@leaving_at_once
def train(
    config: Path, overrides: tuple[str, ...], out: Path | Url, sweep: Path | None, at_once: int | None, fast: bool,
    overfit: int | None, limit_train: int | None, limit_val: int | None, pod_name: str | None, profile: bool,
    dry_run: bool,
) -> None:  # fmt: skip
    """Train what CONFIG describes."""
    from lockstep.config.load import load
    from lockstep.config.sweep import grids_in

    overrides, grids = grids_in(overrides)
    limits = {"train.overfit": overfit, "train.limit": limit_train, "validate.limit": limit_val}
    overrides += tuple(f"{path}={count}" for path, count in limits.items() if count is not None)
    loaded = load(config, with_profile(overrides, profile))
    loaded = loaded.model_copy(update={"name": loaded.name or run_name(config.stem)})
    if sweep is not None or grids:
        if fast or pod_name is not None:
            raise ConfigError(f"{'--fast' if fast else '--pod'}: a sweep has many runs: leave one of the two out")
        _sweep(loaded, sweep, grids, at_once, out, dry_run)
        return
    if at_once is not None:
        raise ConfigError(f"--at-once {at_once}: is for a sweep: --sweep FILE, or --set KEY.PATH=VALUE,VALUE")
    launcher, place = launcher_of(loaded, os.environ, pod_name), Out(out, pod=pod_name)
    if fast:
        from lockstep.launchers import fast as trying

        trying.check(loaded, place)
        if not dry_run:
            with saying_what_is_logged():
                _end(trying.run(loaded, launcher, place, say))
        loaded = trying.of_start(loaded, 0)
    if dry_run:
        _dry_run(loaded, launcher, place)
        return
    here = trains_here(loaded, os.environ)
    with nullcontext() if here else saying_what_is_logged(), launcher.train(loaded, place, say) as ended:
        _end(ended)


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
    from lockstep.record import run_folder

    wanted = Wanted(step, best)
    topology = Topology.from_env(os.environ) if launched(os.environ) and not dry_run else None
    say_whose_code(run_dir)
    with ExitStack() as finding:
        with saying_what_is_logged() if topology is None else nullcontext():
            run = finding.enter_context(resuming.find(run_dir, wanted, topology, dry_run))
        if _start_script_again(run.start_files, wanted, {"--set": overrides, "--profile": profile}, dry_run):
            return
        before = run_folder.read_config(run.start_files).plain()
        loaded = load(run.start_files / run_folder.CONFIG_FILE, with_profile(overrides, profile))
        differing = changes(before, loaded.plain())
        refuse_wrong_changes(differing, loaded.plain())
        mode = loaded.checkpoint.keep.mode

        def prepare(folder: Path, resolved: RunConfig | None) -> Path:
            """Without a config for rank 0, where another launcher starts the ranks and may restart them."""
            if resolved is not None or Topology.from_env(os.environ).attempt == 0:
                resuming.forget(folder)
            if not wanted.is_newest and not resuming.has_gone_back(folder):
                with saying_what_is_logged():
                    say(f"going on from step {resuming.go_back(folder, wanted, mode)}")
            if resolved is not None:
                run_folder.write_config(folder, resolved)
                for change in changes(before, resolved.plain()):
                    say(f"changed: {described(change)}")
            return folder

        launcher, here = launcher_of(loaded, os.environ), trains_here(loaded, os.environ)
        if dry_run:
            _dry_run(loaded, launcher, Out(Path()), str(run_dir))
            if not wanted.is_newest:
                folder = run.folder()
                chosen = resuming.chosen_step(folder, wanted, mode)
                aside = ", ".join(resuming.newer(folder, chosen)) or "none"
                click.echo(f"from step {chosen}; to be set aside: {aside}")
            return
        if not here:
            resuming.refuse_less(run.folder(), wanted, differing, mode)
        run = replace(run, prepare=prepare)
        around = _saved_before(run.start_files) if here else saying_what_is_logged()
        with around, launcher.resume(loaded, run, say) as ended:
            _end(ended)


def _end(ended: Ended) -> None:
    """Says how a launch ended, and leaves with its exit code."""
    if ended.result is not None:
        from lockstep.launchers.ending import conclude

        assert ended.folder is not None and ended.config is not None
        if sys.stdout.isatty():
            click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
        sys.exit(conclude(ended.folder, ended.result, ended.config, say, ended.mirror, ended.url))
    if ended.message:
        say(ended.message)
    if ended.job is not None:
        click.echo(ended.job)  # for a script that goes on with it
    sys.exit(ended.exit_code)


@contextmanager
def _saved_before(folder: Path) -> Iterator[None]:
    """Exits as preempted, not interrupted, where a checkpoint exists: a stop before the first step loses nothing."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED_EXIT_CODE and any((folder / "checkpoints").glob("step-*")):
            raise SystemExit(PREEMPTED_EXIT_CODE) from None
        raise


def _start_script_again(run_dir: Path, wanted: Wanted, options: dict[str, Any], dry_run: bool) -> bool:
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
            say(f"going on from step {resuming.go_back(run_dir, wanted, keep.get('mode', 'min'))}")
    again.become()
    return True


def _dry_run(config: RunConfig, launcher: Launcher, out: Out, folder: str | None = None) -> None:
    """Prints what would be started, once for all ranks."""
    from lockstep.distributed.topology import Topology, launched

    config, plan = launcher.plan(config, out, folder)
    if not launched(os.environ) or Topology.from_env(os.environ).place.rank == 0:
        _print(config, plan)


def _sweep(
    config: RunConfig,
    file: Path | None,
    grids: dict[str, list[Any]],
    at_once: int | None,
    out: Path | Url,
    dry_run: bool,
) -> None:
    from lockstep.config.load import to_yaml
    from lockstep.config.sweep import load_sweep

    if config.launch.type not in ("local", "ray") or trains_here(config, os.environ):
        how = f"launch: {config.launch.type}" if config.launch.type not in ("local", "ray") else "torchrun or srun"
        raise ConfigError(
            f"a sweep starts its trials on this machine (launch: local) or on Ray (launch: ray), not {how}"
        )
    on_ray = config.launch.type == "ray"
    place = _sweep_place(config, out, on_ray)
    sweep = load_sweep(file, config, grids)
    if at_once is not None:
        sweep = sweep.model_copy(update={"concurrency": at_once})
    if dry_run:
        from lockstep.launchers.cluster import is_elsewhere
        from lockstep.tasks.config_checks import ELSEWHERE, check_parts

        check_parts(config, ELSEWHERE if on_ray and is_elsewhere(config) else ())
        _print(config, to_yaml(sweep.model_dump(mode="json")))
        return
    if not on_ray:
        from lockstep.launchers.sweep import sweep_here

        sys.exit(sweep_here(config, sweep, place, say))
    from lockstep.ray.installed import require_answer, require_ray
    from lockstep.record import run_folder
    from lockstep.record.trials import write_sweep

    require_ray()
    require_answer(config.launch.ray)
    from lockstep.ray.tune import sweep_over

    folder = run_folder.create(place, f"{config.name}-sweep")
    write_sweep(folder, sweep)
    say(f"trials in {folder}")
    sys.exit(sweep_over(config, sweep, folder))


def _sweep_place(config: RunConfig, out: Path | Url, on_ray: bool) -> Path:
    from lockstep.mirror.url import is_url

    storage = (config.launch.ray.storage or "") if on_ray else ""
    if isinstance(out, Url) or is_url(storage):
        setting, named = ("launch.ray.storage", storage) if is_url(storage) else ("--out", out)
        raise ConfigError(
            f"{setting} {named}: a sweep writes its trials into one folder: name a folder on a disk, on Ray one that "
            "all nodes share. A single run can be kept in a bucket"
        )
    return Path(storage) if storage else out


def _print(config: RunConfig, plan: str) -> None:
    from lockstep.config.load import to_yaml

    click.echo(to_yaml(config.plain()))
    click.echo(visible(plan))
