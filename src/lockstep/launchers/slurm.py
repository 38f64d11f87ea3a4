"""`launch: slurm`: submits runs as batch jobs of SLURM.

The script of a job starts `lockstep resume RUN_DIR` with srun, so that a requeued job goes on with its run.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import check_profile_ranks, check_strategy
from lockstep.config.schema import RunConfig
from lockstep.distributed.store import wire
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError, LaunchError, LockstepError
from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.record import run_folder

if TYPE_CHECKING:
    from lockstep.launchers.resume import Resumed

SCRIPT, LOGS = "job.sh", "slurm"  # in the run's folder
_ANSWER_SECONDS = 120.0  # a controller that is busy takes its time


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
    config = resolved(config)
    checks.check_imports(config)
    return config, of_run(config, (out.on_disk() / (folder or "RUN_DIR")).absolute()).render()


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    place = out.on_disk()
    config = resolved(config)
    checks.check_names(config)
    folder = run_folder.create(place, str(config.name)).absolute()
    with _removed_on_failure(folder):
        run_folder.write_config(folder, config)
        ended = _submit_run(config, folder)
    yield ended


@contextmanager
def resume(config: RunConfig, run: Resumed, say: Say) -> Iterator[Ended]:
    from lockstep.record import folder_lock

    folder = run.folder()
    config = resolved(config)
    checks.check_names(config)
    with folder_lock.locked(folder):  # until the job may have it
        run.prepare(folder, config)
    yield _submit_run(config, folder.absolute())


def describe(config: RunConfig) -> str:
    return "with launch: slurm"


def _submit_run(config: RunConfig, folder: Path) -> Ended:
    """Submits the job; the message says how to watch it, and how to end it."""
    job = of_run(config, folder)
    number = submit(job)
    tasks, nodes = int(config.processes), config.launch.slurm.nodes
    lines = [
        f"SLURM job {number} is queued: {tasks} task{'s' if tasks > 1 else ''} on {nodes} "
        f"node{'s' if nodes > 1 else ''}; folder {job.folder}",
        f"watch it:   squeue --job {number}",
        f"its output: {job.output.replace('%j', number)}",
        f"end it:     scancel {number}",
    ]
    return Ended(config=config, message="\n".join(lines), job=number)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def submit(job: Job) -> str:
    """Writes the script, submits it, and returns the job's number.

    The ranks' shared secret travels in the environment of the job, which only the job's user can read.
    """
    run_folder.write_text(job.script_file, job.script, depth=2)
    env = {**os.environ, wire.VARIABLE: os.environ.get(wire.VARIABLE) or wire.fresh()}
    try:
        done = subprocess.run(
            job.argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_SECONDS, check=False,
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
            f"sbatch did not answer within {_ANSWER_SECONDS:g} s: is SLURM's controller up (scontrol ping)? The job "
            "may have been queued all the same: squeue --me"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}, and no output"
        raise LaunchError(f"the job was not submitted:\n{said}\nlaunch.slurm of the config says what is asked for")
    number = done.stdout.strip().split(";")[0]  # the name of a cluster may follow
    if not re.fullmatch(r"\d+", number):
        raise LaunchError(f"sbatch said {done.stdout.strip()!r}, which is no number of a job")
    return number


@dataclass(frozen=True)
class Job:
    """A batch job as data: the command, and the script that it submits."""

    argv: tuple[str, ...]
    script: str
    folder: Path
    output: str  # the file that the job writes to; %j stands for its number

    @property
    def script_file(self) -> Path:
        return self.folder / LOGS / SCRIPT

    def render(self) -> str:
        return f"# {self.script_file}\n{self.script}\n# submitted with\n{shlex.join(self.argv)}"


def resolved(config: RunConfig) -> RunConfig:
    """Returns the config with the number of tasks of all nodes, checked against nodes and strategy."""
    tasks = total(config)
    check_strategy(config.strategy, config.runtime, tasks)
    check_profile_ranks(config.profile, tasks)
    return config.model_copy(update={"processes": tasks})


def total(config: RunConfig) -> int:
    """Returns the number of tasks: `processes`, or `nodes` times `tasks_per_node` (or GPUs)."""
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
    return wanted


def of_run(config: RunConfig, folder: Path) -> Job:
    """Returns the job that trains the run of a folder; the config is resolved."""
    _refuse_odd(folder)
    requeue = _REQUEUE.format(saved=PREEMPTED_EXIT_CODE) if config.launch.slurm.requeue else ""
    text = _RUN.format(
        run=shlex.quote(str(folder)), srun=shlex.join(_srun(config)), python=shlex.join(_PYTHON), after=requeue
    )
    log = f"{folder / LOGS}".replace("%", "%%") + "/%j.out"
    argv = ("sbatch", *_options(config), f"--output={log}", str(folder / LOGS / SCRIPT))
    return Job(argv, text, folder, str(folder / LOGS / "%j.out"))


def _refuse_odd(folder: Path) -> None:
    """Refuses folders that sbatch cannot write the job's output to: it reads patterns in the name."""
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
    """Returns the seconds before the time limit at which ranks are asked to save: at least what saving may take."""
    return math.ceil(max(config.launch.slurm.signal_before, config.timeouts.stop))


def _srun(config: RunConfig) -> list[str]:
    """Ranks notice by themselves that one of them failed; SLURM ends those that do not, after a while."""
    cpus = config.launch.slurm.cpus_per_task
    grace = math.ceil(config.timeouts.stop)
    more = [f"--cpus-per-task={cpus}"] if cpus is not None else []  # srun does not take it over from sbatch
    return ["srun", "--kill-on-bad-exit=0", f"--wait={grace}", *more]


_PYTHON = (sys.executable, "-P", "-m", "lockstep")

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
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    echo "lockstep: the job could not be requeued; go on with: lockstep resume $run" >&2
fi
"""
