"""A batch job as data: what sbatch is given, each option an argument of its own, and the script that it runs."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.launch import limit_in_seconds
from lockstep.config.load import check_profile_ranks, check_strategy
from lockstep.config.schema import RunConfig
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError

SCRIPT, LOGS = "job.sh", "slurm"  # in the run's folder


@dataclass(frozen=True)
class Job:
    """What is submitted."""

    argv: tuple[str, ...]
    script: str
    folder: Path
    output: str  # the file that the job writes to; %j, or %A and %a, stand for its number

    @property
    def script_file(self) -> Path:
        return self.folder / LOGS / SCRIPT

    def render(self) -> str:
        """For people, and for a shell."""
        return f"# {self.script_file}\n{self.script}\n# submitted with\n{shlex.join(self.argv)}"


def resolved(config: RunConfig) -> RunConfig:
    """With the number of tasks in all, checked against nodes, GPUs and strategy; the runtime is the nodes' affair."""
    tasks = total(config)
    check_strategy(config.strategy, config.runtime, tasks)
    check_profile_ranks(config.profile, tasks)
    limit = config.launch.slurm.time and limit_in_seconds(config.launch.slurm.time)
    if limit and limit <= warning(config):
        raise ConfigError(
            f"launch.slurm: the time limit {config.launch.slurm.time} is {limit:g} s, and {warning(config)} s "
            "before it the run is asked to save (signal_before, or timeouts.stop where that is longer): as soon as it "
            "starts. Ask for more time, or set them lower"
        )
    return config.model_copy(update={"processes": tasks})


def total(config: RunConfig) -> int:
    """How many tasks the job has: `processes`, or what `nodes` and `tasks_per_node` (or GPUs) come to."""
    asked, wanted = config.launch.slurm, config.processes
    per_node = asked.tasks_per_node or (asked.gpus_per_node if wanted == "auto" else None)
    if wanted == "auto":
        return asked.nodes * (per_node or 1)
    if per_node is not None and wanted != asked.nodes * per_node:
        raise ConfigError(
            f"processes: {wanted}, but launch.slurm asks for {asked.nodes} nodes with {per_node} tasks on each, which "
            f"are {asked.nodes * per_node} tasks: with launch: slurm, processes counts those of all nodes. "
            "Set processes: auto, or leave tasks_per_node out"
        )
    if wanted < asked.nodes:
        raise ConfigError(
            f"processes: {wanted}, but launch.slurm.nodes: {asked.nodes}: every node needs a process at least. Set "
            f"processes: {asked.nodes}, or ask for fewer nodes"
        )
    room = asked.gpus_per_node and asked.nodes * asked.gpus_per_node
    if room and wanted > room and not config.launch.share_devices:
        raise ConfigError(
            f"processes: {wanted}, but launch.slurm asks for {asked.nodes} nodes with {asked.gpus_per_node} GPUs each: "
            f"{wanted} processes need {wanted} GPUs"
        )
    return wanted


def of_run(config: RunConfig, folder: Path) -> Job:
    """The job that trains the run of a folder; its config is a resolved one."""
    asked = config.launch.slurm
    text = script_of_run(srun(config), python(), str(folder), asked.requeue, PREEMPTED_EXIT_CODE)
    return _job(config, folder, text, "%j.out", [])


def of_sweep(config: RunConfig, folder: Path, trials: int, at_once: int) -> Job:
    """The array job of which every task trains one trial of a sweep."""
    asked = config.launch.slurm
    text = script_of_sweep(srun(config), python(), str(folder), asked.requeue, PREEMPTED_EXIT_CODE)
    return _job(config, folder, text, "%A_%a.out", [f"--array=0-{trials - 1}%{at_once}"])


def _job(config: RunConfig, folder: Path, text: str, output: str, more: Sequence[str]) -> Job:
    _refuse_odd(folder)
    log = f"{folder / LOGS}".replace("%", "%%") + f"/{output}"
    options = [*_options(config), f"--output={log}", *more]
    return Job(("sbatch", *options, str(folder / LOGS / SCRIPT)), text, folder, str(folder / LOGS / output))


def _refuse_odd(folder: Path) -> None:
    """sbatch reads patterns in the name of the output, and has no way to write some characters in it."""
    if "\\" in str(folder) or not str(folder).isprintable():
        raise ConfigError(
            f"--out {str(folder)!r}: SLURM cannot write a job's output to a folder with a backslash or a control "
            "character in its name: name another one with --out"
        )


def _options(config: RunConfig) -> list[str]:
    asked = config.launch.slurm
    named = {
        "job-name": config.name,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "nodes": asked.nodes,
        "ntasks": config.processes,
        "ntasks-per-node": asked.tasks_per_node,
        "cpus-per-task": asked.cpus_per_task,
        "gpus-per-node": asked.gpus_per_node,
        "time": asked.time,
        "signal": f"TERM@{warning(config)}",
        "chdir": Path.cwd(),
        "export": "ALL",
        "open-mode": "append",
    }
    options = ["--parsable", "--requeue" if asked.requeue else "--no-requeue"]
    options += [f"--{name}={value}" for name, value in named.items() if value is not None]
    for name, value in asked.extra.items():
        options += [f"--{name}"] if value is True else [] if value is False else [f"--{name}={value}"]
    return options


def warning(config: RunConfig) -> int:
    """Seconds before the limit at which the ranks are asked to save: what saving may take, at least."""
    return math.ceil(max(config.launch.slurm.signal_before, config.timeouts.stop))


def srun(config: RunConfig) -> list[str]:
    """Ranks find out by themselves that one of them failed; SLURM ends those that do not, after a while."""
    cpus = config.launch.slurm.cpus_per_task
    grace = math.ceil(config.timeouts.stop)
    more = [f"--cpus-per-task={cpus}"] if cpus is not None else []  # srun does not take it over from sbatch
    return ["srun", "--kill-on-bad-exit=0", f"--wait={grace}", *more]


def python() -> list[str]:
    return [sys.executable, "-P", "-m", "lockstep"]


_RUN = """\
#!/bin/bash
# Written by Lockstep: starts the run, and goes on with it when the job was requeued.
run={run}
told=
trap 'told=1' TERM
{srun} \\
    {python} resume "$run"
code=$?
{after}exit "$code"
"""

_REQUEUE = """\
if [ "$code" -eq {saved} ] && [ -z "$told" ]; then
    scontrol requeue "{job}" && exit "$code"
    echo "lockstep: the job could not be requeued; go on with: lockstep resume $run" >&2
fi
"""

_TABLE = """\
{python} sweep {folder} --ended "$SLURM_ARRAY_TASK_ID" "$code"
"""


def script_of_run(srun: Sequence[str], python: Sequence[str], folder: str, requeue: bool, saved: int) -> str:
    after = _REQUEUE.format(saved=saved, job="$SLURM_JOB_ID") if requeue else ""
    return _RUN.format(run=shlex.quote(folder), srun=shlex.join(srun), python=shlex.join(python), after=after)


def script_of_sweep(srun: Sequence[str], python: Sequence[str], folder: str, requeue: bool, saved: int) -> str:
    """Every task of the array has a folder of its own, by its number; the last to end leaves the whole table."""
    # By the array's number and its own: its job number alone may be that of the whole array.
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    run = shlex.quote(f"{folder}/trial-") + '"$(printf %05d "$SLURM_ARRAY_TASK_ID")"'
    after = _REQUEUE.format(saved=saved, job=job) if requeue else ""
    after += _TABLE.format(python=shlex.join(python), folder=shlex.quote(folder))
    return _RUN.format(run=run, srun=shlex.join(srun), python=shlex.join(python), after=after)
