"""Runs and sweeps as batch jobs of SLURM."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError
from lockstep.launchers import checking

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.config.sweep import Sweep
    from lockstep.launchers.slurm.job import Job


import os
import re
import subprocess

from lockstep.config.load import with_values
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Sweep, drawn, trial_count
from lockstep.distributed.store import wire
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.slurm.job import Job
from lockstep.record import run_folder
from lockstep.record.trials import Trial, trial_folder, write_sweep, write_trials


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
    from lockstep.launchers.slurm.job import resolved

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
    from lockstep.launchers.slurm.job import of_run

    job = of_run(config, folder.absolute())
    return Queued(submit(job), job, int(config.processes), config.launch.slurm.nodes)


def sweep(config: RunConfig, asked: Sweep, out: Path) -> Queued:
    """Submit every trial of a sweep, as the tasks of an array."""
    from lockstep.launchers.slurm.job import of_sweep
    from lockstep.record import run_folder

    trials, config = check(asked), resolved(config)
    folder = run_folder.create(out, f"{config.name}-sweep").absolute()
    with _removed_on_failure(folder):
        make_folders(config, asked, folder)
        job = of_sweep(config, folder, trials, asked.concurrency)
        return Queued(submit(job), job, int(config.processes), config.launch.slurm.nodes, trials)


def described(config: RunConfig, folder: Path) -> str:
    """The script and the command, ready to paste."""
    from lockstep.launchers.slurm.job import of_run

    return of_run(resolved(config), folder.absolute()).render()


def described_sweep(config: RunConfig, asked: Sweep, folder: Path) -> str:
    from lockstep.launchers.slurm.job import of_sweep

    return of_sweep(resolved(config), folder.absolute(), check(asked), asked.concurrency).render()


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """A job that was refused leaves no folder of a run that never was."""
    try:
        yield
    except LockstepError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_LONGEST = 120.0  # seconds for an answer: a controller that is busy takes its time


def submit(job: Job) -> str:
    """Write the script, submit it, and give the job's number.

    The secret by which the ranks know each other on several hosts travels in the environment of the job, which SLURM
    keeps for the job's own user.
    """
    run_folder.write_text(job.script_file, job.script, depth=2)
    env = {**os.environ, wire.VARIABLE: os.environ.get(wire.VARIABLE) or wire.fresh()}
    try:
        done = subprocess.run(
            job.argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_LONGEST, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError(
            "launch: slurm needs sbatch, which is not on this machine (or not on PATH): give the command on a login "
            "node of the cluster; inside of an allocation, start it with srun"
        ) from None
    except OSError as error:
        raise LaunchError(f"launch: slurm: sbatch cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"sbatch did not answer within {_LONGEST:g} s: is SLURM's controller up (scontrol ping)? The job may have "
            "been queued all the same: squeue --me"
        ) from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}, and no word"
        raise LaunchError(f"the job was not submitted:\n{words}\nlaunch.slurm of the config says what is asked for")
    number = done.stdout.strip().split(";")[0]  # the name of a cluster may follow
    if not re.fullmatch(r"\d+", number):
        raise LaunchError(f"sbatch said {done.stdout.strip()!r}, which is no number of a job")
    return number


MOST_TRIALS = 100_000  # SLURM's own limit (MaxArraySize) is usually 1,001


def check(sweep: Sweep) -> int:
    """The number of trials. Refuses what trials that know nothing of each other cannot do."""
    if sweep.prune is not None:
        raise ConfigError(
            f"prune: {sweep.prune.type} compares trials while they run, and the tasks of a SLURM array know nothing of "
            "each other: it needs Ray. Leave prune out, or leave launch: slurm out and sweep on a Ray cluster"
        )
    count = trial_count(sweep)
    if count > MOST_TRIALS:
        raise ConfigError(f"the sweep has {count} trials, and a SLURM array can have {MOST_TRIALS} at most")
    return count


def make_folders(config: RunConfig, sweep: Sweep, folder: Path) -> None:
    """All that the tasks need; a trial whose config is none is told of before anything is submitted."""
    trials = [Trial(number, values, "queued", None, None) for number, values in enumerate(drawn(sweep))]
    configs = [with_values(config, each.values) for each in trials]
    for trial, chosen in zip(trials, configs, strict=True):
        run = folder / trial_folder(trial.number)
        (run / "logs").mkdir(parents=True)
        run_folder.write_config(run, chosen)
    write_sweep(folder, sweep)
    write_trials(folder, trials)
