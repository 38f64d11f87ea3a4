"""Runs and sweeps as batch jobs of SLURM."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.start import checking

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.config.sweep import Sweep
    from lockstep.slurm.job import Job


@dataclass(frozen=True)
class Queued:
    """A job that SLURM has."""

    number: str
    job: Job
    tasks: int
    nodes: int
    trials: int | None = None

    def render(self) -> str:
        """What it is, how to watch it, and how to end it."""
        output = self.job.output.replace("%j", self.number).replace("%A", self.number).replace("%a", "0")
        each = f", {self.trials} trials with" if self.trials is not None else ":"
        lines = [
            f"SLURM job {self.number} is queued{each} {self.tasks} task{'s' if self.tasks > 1 else ''} on {self.nodes} "
            f"node{'s' if self.nodes > 1 else ''}; folder {self.job.folder}",
            f"watch it:   squeue --job {self.number}",
            f"its output: {output}" + (" (and so on, by trial)" if self.trials is not None else ""),
            f"end it:     scancel {self.number}",
        ]
        if self.trials is not None:
            lines.append(f"its table:  lockstep sweep {self.job.folder}")
        return "\n".join(lines)


def resolved(config: RunConfig) -> RunConfig:
    from lockstep.slurm.job import resolved

    return resolved(config)


def train(config: RunConfig, out: Path) -> Queued:
    """Submit a new run, whose folder is made here."""
    from lockstep.record import run_folder

    config = resolved(config)
    checking.check(config)
    folder = run_folder.create(out, str(config.name)).absolute()
    with _removed_on_failure(folder):
        run_folder.write_config(folder, config)
        return resume(config, folder)


def resume(config: RunConfig, folder: Path) -> Queued:
    """Submit the run of a folder, with its config as it is there."""
    from lockstep.slurm.job import of_run
    from lockstep.slurm.submit import submit

    job = of_run(config, folder.absolute())
    return Queued(submit(job), job, int(config.processes), config.launch.slurm.nodes)


def sweep(config: RunConfig, asked: Sweep, out: Path) -> Queued:
    """Submit every trial of a sweep, as the tasks of an array."""
    from lockstep.record import run_folder
    from lockstep.slurm import sweep as array
    from lockstep.slurm.job import of_sweep
    from lockstep.slurm.submit import submit

    trials, config = array.check(asked), resolved(config)
    folder = run_folder.create(out, f"{config.name}-sweep").absolute()
    with _removed_on_failure(folder):
        array.make_folders(config, asked, folder)
        job = of_sweep(config, folder, trials, asked.concurrency)
        return Queued(submit(job), job, int(config.processes), config.launch.slurm.nodes, trials)


def described(config: RunConfig, folder: Path) -> str:
    """The script and the command, ready to paste."""
    from lockstep.slurm.job import of_run

    return of_run(resolved(config), folder.absolute()).render()


def described_sweep(config: RunConfig, asked: Sweep, folder: Path) -> str:
    from lockstep.slurm import sweep as array
    from lockstep.slurm.job import of_sweep

    return of_sweep(resolved(config), folder.absolute(), array.check(asked), asked.concurrency).render()


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """A job that was refused leaves no folder of a run that never was."""
    try:
        yield
    except LockstepError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
