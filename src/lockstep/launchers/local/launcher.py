"""`launch: local`: starts the ranks of a run on this host and waits for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.plan import LaunchPlan
    from lockstep.launchers.resume import Resumed
    from lockstep.mirror.mirror import Mirror


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
    from lockstep.terminal import say

    config = resolved(config, say)
    checks.check_imports(config)
    return config, _plan(config, folder or "RUN_DIR").render()


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    out.check()
    config = resolved(config, say)
    _check_names(config)
    folder = out.new(config)
    with _held(folder, config, say) as mirror:
        yield _launch(folder, config, mirror, say)


@contextmanager
def resume(config: RunConfig, run: Resumed, say: Say) -> Iterator[Ended]:
    folder = run.folder()
    with _held(folder, config, say) as mirror:
        config = resolved(config, say)
        _check_names(config)
        run.prepare(folder, config)
        yield _launch(folder, config, mirror, say)


def describe(config: RunConfig) -> str:
    return "on this host"


def resolved(config: RunConfig, say: Say) -> RunConfig:
    """Returns the config with this host's runtime and number of processes, checked against batch size and strategy."""
    from lockstep import runtime
    from lockstep.config.load import check_profile_ranks, check_strategy, uneven_shares
    from lockstep.config.strategy import batch_shares
    from lockstep.record import loggers

    family, processes = runtime.resolve(config)
    loggers.check(config.log)
    if idle := runtime.unused_devices(family, processes):
        say(idle)
    check_strategy(config.strategy, family, processes)
    check_profile_ranks(config.profile, processes)
    if uneven := uneven_shares(config.train.batch_size, batch_shares(config.strategy, family, processes)):
        say(uneven)
    return config.model_copy(update={"runtime": family, "processes": processes})


def _plan(config: RunConfig, folder: str) -> LaunchPlan:
    from lockstep.launchers.plan import local_plan

    argv = [sys.executable, "-P", "-m", "lockstep.worker", folder]
    launch = config.launch
    return local_plan(argv, int(config.processes), threads=launch.threads, port=launch.port)


def _check_names(config: RunConfig) -> None:
    """Refuses a config that names what its task does not have, while the fork server imports torch for the ranks."""
    from lockstep.launchers.local import fork_server

    fork_server.warm_up(_plan(config, "").threads)
    fork_server.check(config)


@contextmanager
def _held(folder: Path, config: RunConfig, say: Say) -> Iterator[Mirror | None]:
    from lockstep.mirror.mark import mirrored
    from lockstep.record import folder_lock

    with folder_lock.locked(folder), mirrored(folder, config, say) as mirror:
        yield mirror


def _launch(folder: Path, config: RunConfig, mirror: Mirror | None, say: Say) -> Ended:
    from lockstep.distributed.watch.stall import Limits
    from lockstep.launchers.local import supervisor

    plan = _plan(config, str(folder))
    count = len(plan.processes)
    threads = f", {plan.threads} thread{'s' if plan.threads > 1 else ''} each" if config.runtime != "xla" else ""
    if config.after is None:
        say(f"{count} process{'es' if count > 1 else ''} on {config.runtime}{threads}; run folder {folder}")
    result = supervisor.launch(
        plan, max_restarts=config.launch.max_restarts, grace=config.timeouts.stop,
        watch=Limits.of(config.timeouts, config.runtime), folder=folder,
    )  # fmt: skip
    return Ended(result.exit_code, config, folder, result, mirror)
