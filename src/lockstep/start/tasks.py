"""A process that a batch system started: as one of several ranks, or alone in a job of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.distributed.batch import BatchTask, batch_task
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig


def is_to_be_submitted(config: RunConfig, env: Mapping[str, str]) -> bool:
    """`launch: slurm` outside of an allocation; inside of one it means what is there."""
    return config.launch.type == "slurm" and "SLURM_JOB_ID" not in env


def trains_here(config: RunConfig, env: Mapping[str, str]) -> bool:
    """Whether this process is a rank: by a launcher, or as the only task of a job."""
    from lockstep.distributed.topology import launched

    return launched(env) or (config.launch.type == "slurm" and not is_to_be_submitted(config, env))


def check_processes(config: RunConfig, env: Mapping[str, str]) -> BatchTask | None:
    """The place of this process in its job; refuses a job that has not the processes that the config asks for."""
    from lockstep.distributed.topology import has_rank

    task = None if has_rank(env) else batch_task(env)
    wanted, in_all = config.processes, config.launch.type == "slurm"
    if wanted == "auto" or (task is None and not (in_all and "SLURM_JOB_ID" in env)) or has_rank(env):
        return task
    if task is None:
        if wanted != 1:
            raise ConfigError(
                f"processes: {wanted}, but this is one process by itself in SLURM's job {env['SLURM_JOB_ID']}: start "
                f"as many with srun (srun --ntasks={wanted} lockstep ...), or set processes: 1"
            )
        return None
    per_host = set(task.per_host or [task.local_size])
    if wanted == task.size or (not in_all and per_host == {wanted}):
        return task
    on_each = "" if in_all else ", or so many on every host"
    raise ConfigError(
        f"processes: {wanted}, but there are {task.spread}: start {wanted} in all{on_each}; or set processes: "
        f"{task.size}, or auto for as many as there are"
    )
