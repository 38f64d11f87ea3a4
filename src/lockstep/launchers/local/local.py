"""Ranks on this host: by our own launcher, or this process itself where another launcher has made it one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.launchers.plan import LaunchPlan

Tell = Callable[[str], None]


def resolved(config: RunConfig, tell: Tell) -> RunConfig:
    """With runtime and processes as they are here, checked against the batch size and the strategy."""
    from lockstep import runtime
    from lockstep.config.load import check_profile_ranks, check_strategy, uneven_shares
    from lockstep.config.strategy import batch_shares
    from lockstep.launchers.local import limits
    from lockstep.record import loggers

    family, processes = runtime.resolve(config)
    loggers.check(config.log)
    limits.check(processes, config.data.workers)
    if idle := runtime.unused_devices(family, processes):
        tell(idle)
    check_strategy(config.strategy, family, processes)
    check_profile_ranks(config.profile, processes)
    if uneven := uneven_shares(config.train.batch_size, batch_shares(config.strategy, family, processes)):
        tell(uneven)
    return config.model_copy(update={"runtime": family, "processes": processes})


def plan(config: RunConfig, folder: str) -> LaunchPlan:
    """What would be started to train a resolved config."""
    from lockstep.launchers.plan import local_plan

    argv = [sys.executable, "-P", "-m", "lockstep.worker", folder]
    limits = config.launch
    return local_plan(argv, int(config.processes), threads=limits.threads, port=limits.port, watched=True)


def warm_up(plan: LaunchPlan) -> None:
    """Have torch loaded for the ranks while this process goes on."""
    from lockstep.launchers.local import fork_server

    fork_server.warm_up(plan.threads)


def check(config: RunConfig) -> None:
    """Refuse a config that names what its task does not have, before a folder is made and a rank is started."""
    from lockstep.launchers.local import fork_server

    warm_up(plan(config, ""))
    fork_server.check(config)


def train(folder: Path, config: RunConfig, tell: Tell) -> Result:
    """Start all ranks of a resolved config and wait for them, in a folder that the caller holds."""
    from lockstep.distributed.watch.stall import Limits
    from lockstep.launchers.local import supervisor

    planned = plan(config, str(folder))
    count = len(planned.processes)
    threads = f", {planned.threads} thread{'s' if planned.threads > 1 else ''} each" if config.runtime != "xla" else ""
    tell(f"{count} process{'es' if count > 1 else ''} on {config.runtime}{threads}; run folder {folder}")
    return supervisor.launch(
        planned,
        max_restarts=config.launch.max_restarts,
        grace=config.timeouts.stop,
        watch=Limits.of(config.timeouts, config.runtime),
        folder=folder,
    )


def train_as_rank(
    config: RunConfig,
    make_folder: Callable[[], Path],
    ended: Callable[[dict[str, Any]], None] = lambda outcome: None,
    prepare: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Train as the rank that the environment says; the exit code of an orderly end.

    `ended` is told what rank 0 wrote down of the end, and the run's folder; `prepare` is called by rank 0 once it
    holds that.
    """
    from lockstep.distributed.topology import Topology
    from lockstep.launchers import batch_tasks, fitting
    from lockstep.terminal import tell as say

    task = batch_tasks.check_processes(config, os.environ)
    topology = Topology.from_env(os.environ)
    if topology.place.rank == 0 and topology.attempt == 0:
        fitting.not_checked(config, "where another launcher starts the ranks", lambda text: say(f"lockstep: {text}"))
    if task is not None:
        batch_tasks.settle_in(config, topology)
    from lockstep import worker

    # Where hosts have different numbers of batch_tasks, what ranks compare must still be the same.
    count = topology.local_world_size if task is None else topology.world_size
    here = config.model_copy(update={"processes": count})
    if task is None and config.launch.type != "slurm":
        return worker.train(here, topology, make_folder, ended, prepare)
    with batch_tasks.telling_failure(topology) as known:
        return worker.train(here, topology, make_folder, ended, prepare, known.append)
