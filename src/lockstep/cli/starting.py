"""From a config to ranks that train, and what the user is told of them: what the commands that train share.

Like the command line, it imports torch only where it is needed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.errors import PREEMPTED_EXIT_CODE

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.launcher.plan import LaunchPlan


def name_after(config: Path) -> str:
    """A run's name from its config's file name, in the characters that names may have."""
    return re.sub(r"[^\w.-]+", "-", config.stem).strip(".-") or "run"


def resolved(config: RunConfig) -> RunConfig:
    """With runtime and processes as they are here, checked against the batch size and the strategy."""
    from lockstep import runtime
    from lockstep.config.load import check_batch_size, check_profile_ranks, check_strategy

    family, processes = runtime.resolve(config)
    if idle := runtime.unused_devices(family, processes):
        say(idle)
    check_strategy(config.strategy.type, processes)
    check_profile_ranks(config.profile, processes)
    check_batch_size(config.train.batch_size, processes, config.train.accumulate)
    return config.model_copy(update={"runtime": family, "processes": processes})


def training_plan(config: RunConfig, folder: str) -> LaunchPlan:
    from lockstep.launcher.plan import local_plan

    argv = [sys.executable, "-m", "lockstep.worker", folder]
    limits = config.launch
    return local_plan(argv, int(config.processes), threads=limits.threads, port=limits.port, watched=True)


def print_plan(config: RunConfig, plan: LaunchPlan) -> None:
    from lockstep.config.load import to_yaml

    click.echo(to_yaml(config.plain()))
    click.echo(plan.render())


def warm_up(plan: LaunchPlan) -> None:
    from lockstep.launcher import local

    local.warm_up(plan.threads)


def new_folder(out: Path, setting: str, config: RunConfig) -> Path:
    from lockstep.record import run_folder

    folder = run_folder.create(out, str(config.name), setting)
    run_folder.write_config(folder, config)
    return folder


def train_as_rank(config: RunConfig, make_folder: Callable[[], Path]) -> int:
    from lockstep import worker
    from lockstep.distributed.topology import Topology

    topology = Topology.from_env(os.environ)
    return worker.train(config.model_copy(update={"processes": topology.local_world_size}), topology, make_folder)


def train_on_ray(config: RunConfig, make_folder: Callable[[RunConfig], Path], dry_run: bool) -> None:
    from lockstep.config.load import to_yaml
    from lockstep.ray.address import require_answer
    from lockstep.ray.installed import require_train_v2

    require_train_v2()
    if not dry_run:
        require_answer(config.launch.ray)
    from lockstep.ray.controller import described, launch

    if dry_run:
        click.echo(to_yaml(config.plain()))
        click.echo(described(config))
        return
    ended = launch(config, make_folder)
    _tell(ended.folder, ended.result, ended.config)
    sys.exit(ended.result.exit_code)


def sweep(config: RunConfig, file: Path, out: Path, dry_run: bool) -> None:
    from lockstep.config.load import to_yaml
    from lockstep.config.sweep import load_sweep
    from lockstep.ray.address import require_answer
    from lockstep.ray.installed import require_train_v2
    from lockstep.record import run_folder

    sweep = load_sweep(file, config)
    if dry_run:
        click.echo(to_yaml(config.plain()))
        click.echo(to_yaml(sweep.model_dump(mode="json")))
        return
    require_train_v2()
    require_answer(config.launch.ray)
    from lockstep.ray.tune import sweep_over

    storage = config.launch.ray.storage
    folder = run_folder.create(Path(storage) if storage else out, f"{config.name}-sweep")
    say(f"trials in {folder}")
    sys.exit(sweep_over(config, sweep, folder))


def train(folder: Path, config: RunConfig) -> None:
    from lockstep.distributed.watch.stall import Limits
    from lockstep.launcher import local
    from lockstep.record import run_folder

    plan = training_plan(config, str(folder))
    count = len(plan.processes)
    threads = f", {plan.threads} thread{'s' if plan.threads > 1 else ''} each" if config.runtime != "xla" else ""
    say(f"{count} process{'es' if count > 1 else ''} on {config.runtime}{threads}; run folder {folder}")
    with run_folder.locked(folder):
        result = local.launch(
            plan,
            max_restarts=config.launch.max_restarts,
            grace=config.launch.grace,
            watch=Limits.of(config.watch, config.runtime),
        )
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)  # a rank that was killed left the cursor hidden
    _tell(folder, result, config)
    sys.exit(result.exit_code)


def _tell(folder: Path, result: Result, config: RunConfig) -> None:
    from lockstep.record.run_folder import SUMMARY_FILE, record

    if result.failure is not None:
        failure = result.failure
        record(folder, "failed", failure.cause)
        say(failure.render(int(config.processes)))
        log = folder / "logs" / f"rank-{failure.rank}.log"
        if log.exists():  # a rank has one from the roll call on
            say(f"log: {log}")
        if any((folder / "checkpoints").glob("step-*")):
            say(f"go on from the last checkpoint with: lockstep resume {folder}")
        return
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"saved and stopped; go on with: lockstep resume {folder}")
        return
    if result.exit_code:
        say(f"ended at once; go on from the last checkpoint with: lockstep resume {folder}")
        return
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    say(f"{summary['status']}: {_outcome(summary)}")
    say(f"run folder: {folder}")
    limit = "steps" if config.train.steps is not None else "epochs"
    say(f"train further:  lockstep resume {folder} --set train.{limit}=N")
    say(f"look at it:     tensorboard --logdir {folder}") if (folder / "tensorboard").is_dir() else None
    say(f"its profile:    lockstep profile view {folder}") if (folder / "profile").is_dir() else None


def _outcome(summary: Mapping[str, Any]) -> str:
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items() if value is not None)
    return f"epoch {summary['epoch']}, step {summary['step']} in {summary['seconds']:.1f} s  {metrics}"


def say(text: str) -> None:
    for line in text.splitlines():
        click.echo(f"lockstep: {line}" if line else "", err=True)
