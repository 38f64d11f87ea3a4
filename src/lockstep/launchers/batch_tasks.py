"""A process that a batch system started: as one of several ranks, or alone in a job of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.batch import BatchTask, batch_task
from lockstep.errors import ConfigError, WorkerFailed
from lockstep.shown import shown

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.topology import Topology


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

    if has_rank(env):
        return None
    task, wanted, in_all = batch_task(env), config.processes, config.launch.type == "slurm"
    if wanted == "auto":
        return task
    if task is None:
        if in_all and "SLURM_JOB_ID" in env and wanted != 1:
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


def settle_in(config: RunConfig, topology: Topology) -> None:
    """What torchrun does for its ranks and a batch system does not; before torch is loaded, which reads it then."""
    from lockstep.launchers.plan import available_cores

    if config.launch.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)
    share = os.environ.get("SLURM_CPUS_PER_TASK") or str(max(1, available_cores() // topology.local_world_size))
    os.environ.setdefault("OMP_NUM_THREADS", share)
    topology.tell(os.environ)


@contextlib.contextmanager
def telling_failure(topology: Topology) -> Iterator[list[Path]]:
    """No launcher waits to say which task failed and why: the task does so itself, in the output of the job.

    Gives a list for the run's folder, once it is there: from then on what other ranks than the first print goes to
    their logs.
    """
    from lockstep.distributed.failure import Failure, how_to_plan, report
    from lockstep.record import run_folder

    rank, host = topology.place.rank, topology.place.host
    output, known = os.dup(2), list[Path]()
    try:
        yield known
    except Exception as error:
        found = report(error, rank, host)
        failure = Failure(
            rank, host, found.message, found.exit_code, traceback=found.traceback,
            concerns_all_ranks=found.concerns_all_ranks,
        )  # fmt: skip
        text = failure.render(topology.world_size)
        if found.memory:
            text += f"\n{how_to_plan('CONFIG', topology.world_size)}"
        if known and rank == 0:
            run_folder.record(known[0], "failed", found.message)
        elif known:
            with contextlib.suppress(OSError):
                os.write(output, "".join(f"lockstep: {line}\n" for line in shown(text).split("\n")).encode())
        raise WorkerFailed(rank, host, text, found.exit_code) from error
    finally:
        os.close(output)
