"""A sweep as an array job: a folder with its config for every trial, made before any of them starts."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.load import with_values
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Sweep, drawn, trial_count
from lockstep.errors import ConfigError
from lockstep.record import run_folder
from lockstep.record.trials import Trial, trial_folder, write_sweep, write_trials

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
