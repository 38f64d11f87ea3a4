"""Trains in this process, which another launcher (torchrun, srun) has started as a rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.distributed.batch import BatchTask, batch_task
from lockstep.distributed.topology import Topology, has_rank
from lockstep.errors import ConfigError, WorkerFailed
from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.shown import shown
from lockstep.terminal import standard_error

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.resume import Resumed


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
    check_processes(config, os.environ)
    topology = Topology.from_env(os.environ)
    config = config.model_copy(update={"processes": topology.local_world_size})
    if topology.place.rank == 0:
        checks.check_imports(config)
    return config, f"under the launcher that started this process: {topology.world_size} ranks"


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    yield _train(config, lambda: out.new(config), lambda folder: None)


@contextmanager
def resume(config: RunConfig, run: Resumed, say: Say) -> Iterator[Ended]:
    def prepare(folder: Path) -> None:
        run.prepare(folder, None)

    yield _train(config, run.folder, prepare)


def describe(config: RunConfig) -> str:
    return "where another launcher starts the ranks"


def _train(config: RunConfig, make_folder: Callable[[], Path], prepare: Callable[[Path], None]) -> Ended:
    """Rank 0 makes the folder, and prepares it once it holds it."""
    task = check_processes(config, os.environ)
    topology = Topology.from_env(os.environ)
    if task is not None:
        _set_up(config, topology)
    from lockstep import worker

    # Where hosts have different numbers of tasks, what ranks compare must still be the same.
    count = topology.local_world_size if task is None else topology.world_size
    here = config.model_copy(update={"processes": count})
    outcomes: list[dict[str, Any]] = []
    in_job = task is not None or config.launch.type == "slurm"
    with _reporting_failure(topology) if in_job else contextlib.nullcontext(list[Path]()) as folders:
        code = worker.train(here, topology, make_folder, outcomes.append, prepare, folders.append)
    return Ended(code, here, outcome=outcomes[0] if outcomes else None)


def check_processes(config: RunConfig, env: Mapping[str, str]) -> BatchTask | None:
    """Returns this process's place in its job. Refuses a job with another number of processes than the config's."""
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


def _set_up(config: RunConfig, topology: Topology) -> None:
    """Does what torchrun does for its ranks and a batch system does not, before torch is imported."""
    from lockstep.launchers.plan import available_cores

    if config.launch.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)
    cores = os.environ.get("SLURM_CPUS_PER_TASK") or str(max(1, available_cores() // topology.local_world_size))
    os.environ.setdefault("OMP_NUM_THREADS", cores)
    topology.tell(os.environ)


@contextmanager
def _reporting_failure(topology: Topology) -> Iterator[list[Path]]:
    """Reports which task failed and why in the output of the job, since no launcher waits to do so.

    Yields a list for the run's folder: once it is known, what ranks other than the first print goes to their logs.
    """
    from lockstep.distributed.failure import Failure, how_to_plan, report
    from lockstep.record import run_folder

    rank, host = topology.place.rank, topology.place.host
    output, folders = standard_error(), list[Path]()
    try:
        yield folders
    except Exception as error:
        found = report(error, rank, host)
        failure = Failure(
            rank, host, found.message, found.exit_code, traceback=found.traceback,
            concerns_all_ranks=found.concerns_all_ranks,
        )  # fmt: skip
        text = failure.render(topology.world_size)
        if found.memory:
            text += f"\n{how_to_plan('CONFIG', topology.world_size)}"
        if folders and rank == 0:
            run_folder.record(folders[0], "failed", found.message)
        elif folders:
            with contextlib.suppress(OSError):
                os.write(output, "".join(f"lockstep: {line}\n" for line in shown(text).split("\n")).encode())
        raise WorkerFailed(rank, host, text, found.exit_code) from error
    finally:
        os.close(output)
