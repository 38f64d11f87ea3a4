"""`launch: slurm`: submits runs and sweeps as batch jobs of SLURM.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import check_profile_ranks, check_strategy, with_values
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Sweep, drawn, trial_count
from lockstep.distributed.store import wire
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError, LaunchError, LockstepError
from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.record import run_folder
from lockstep.record.trials import Trial, trial_folder, write_sweep, write_trials

if TYPE_CHECKING:
    from lockstep.launchers.resume import Resumed

SCRIPT, LOGS = "job.sh", "slurm"  # in the run's folder
MOST_TRIALS = 100_000  # SLURM's own limit (MaxArraySize) is usually 1,001
_ANSWER_SECONDS = 120.0  # a controller that is busy takes its time


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, Job]:
    config = resolved(config)
    checks.check_imports(config)
    return config, of_run(config, (out.on_disk() / (folder or "RUN_DIR")).absolute())


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


def plan_sweep(config: RunConfig, sweep: Sweep, folder: Path) -> tuple[RunConfig, Job]:
    config = resolved(config)
    return config, of_sweep(config, folder.absolute(), check_sweep(sweep), sweep.concurrency)


def submit_sweep(config: RunConfig, sweep: Sweep, out: Path) -> Ended:
    """Submits every trial of a sweep, as the tasks of an array."""
    trials, config = check_sweep(sweep), resolved(config)
    folder = run_folder.create(out, f"{config.name}-sweep").absolute()
    with _removed_on_failure(folder):
        make_trial_folders(config, sweep, folder)
        job = of_sweep(config, folder, trials, sweep.concurrency)
        return _queued(config, job, submit(job), trials)


def _submit_run(config: RunConfig, folder: Path) -> Ended:
    job = of_run(config, folder)
    return _queued(config, job, submit(job))


def _queued(config: RunConfig, job: Job, number: str, trials: int | None = None) -> Ended:
    """Says what was queued, how to watch it, and how to end it."""
    tasks, nodes = int(config.processes), config.launch.slurm.nodes
    output = job.output.replace("%j", number).replace("%A", number).replace("%a", "0")
    each = f", {trials} trials with" if trials is not None else ":"
    lines = [
        f"SLURM job {number} is queued{each} {tasks} task{'s' if tasks > 1 else ''} on {nodes} "
        f"node{'s' if nodes > 1 else ''}; folder {job.folder}",
        f"watch it:   squeue --job {number}",
        f"its output: {output}" + (" (and so on, by trial)" if trials is not None else ""),
        f"end it:     scancel {number}",
    ]
    if trials is not None:
        lines.append(f"its table:  lockstep sweep {job.folder}")
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


def check_sweep(sweep: Sweep) -> int:
    """Returns the number of trials. Refuses sweeps whose trials need to know of each other."""
    if sweep.prune is not None:
        raise ConfigError(
            f"prune: {sweep.prune.type} compares trials while they run, and the tasks of a SLURM array know nothing of "
            "each other: it needs Ray. Leave prune out, or leave launch: slurm out and sweep on a Ray cluster"
        )
    count = trial_count(sweep)
    if count > MOST_TRIALS:
        raise ConfigError(f"the sweep has {count} trials, and a SLURM array can have {MOST_TRIALS} at most")
    return count


def make_trial_folders(config: RunConfig, sweep: Sweep, folder: Path) -> None:
    """Writes the folder of every trial; a trial with an invalid config is refused before anything is submitted."""
    trials = [Trial(number, values, "queued", None, None) for number, values in enumerate(drawn(sweep))]
    configs = [with_values(config, each.values) for each in trials]
    for trial, chosen in zip(trials, configs, strict=True):
        run = folder / trial_folder(trial.number)
        (run / "logs").mkdir(parents=True)
        run_folder.write_config(run, chosen)
    write_sweep(folder, sweep)
    write_trials(folder, trials)


@dataclass(frozen=True)
class Job:
    """A batch job as data: the command, and the script that it submits."""

    argv: tuple[str, ...]
    script: str
    folder: Path
    output: str  # the file that the job writes to; %j, or %A and %a, stand for its number

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
    text = _script(config, shlex.quote(str(folder)), "$SLURM_JOB_ID")
    return _job(config, folder, text, "%j.out", [])


def of_sweep(config: RunConfig, folder: Path, trials: int, at_once: int) -> Job:
    """Returns the array job whose tasks train one trial of a sweep each."""
    # By the numbers of the array and the task: the job number alone may be that of the whole array.
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    run = shlex.quote(f"{folder}/trial-") + '"$(printf %05d "$SLURM_ARRAY_TASK_ID")"'
    table = _TABLE.format(python=shlex.join(_PYTHON), folder=shlex.quote(str(folder)))
    text = _script(config, run, job, table)
    return _job(config, folder, text, "%A_%a.out", [f"--array=0-{trials - 1}%{at_once}"])


def _job(config: RunConfig, folder: Path, text: str, output: str, more: Sequence[str]) -> Job:
    _refuse_odd(folder)
    log = f"{folder / LOGS}".replace("%", "%%") + f"/{output}"
    options = [*_options(config), f"--output={log}", *more]
    return Job(("sbatch", *options, str(folder / LOGS / SCRIPT)), text, folder, str(folder / LOGS / output))


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
    scontrol requeue "{job}" && exit "$code"
    echo "lockstep: the job could not be requeued; go on with: lockstep resume $run" >&2
fi
"""

_TABLE = """\
{python} sweep {folder} --ended "$SLURM_ARRAY_TASK_ID" "$code"
"""


def _script(config: RunConfig, run: str, job: str, table: str = "") -> str:
    requeue = _REQUEUE.format(saved=PREEMPTED_EXIT_CODE, job=job) if config.launch.slurm.requeue else ""
    return _RUN.format(run=run, srun=shlex.join(_srun(config)), python=shlex.join(_PYTHON), after=requeue + table)
