"""Handing a job to SLURM."""

from __future__ import annotations

import os
import re
import subprocess

from lockstep.distributed.store import secret
from lockstep.errors import LaunchError
from lockstep.record import run_folder
from lockstep.slurm.job import Job

_LONGEST = 120.0  # seconds for an answer: a controller that is busy takes its time


def submit(job: Job) -> str:
    """Write the script, submit it, and give the job's number.

    The secret by which the ranks know each other on several hosts travels in the environment of the job, which SLURM
    keeps for the job's own user.
    """
    run_folder.write_text(job.script_file, job.script, depth=2)
    env = {**os.environ, secret.VARIABLE: os.environ.get(secret.VARIABLE) or secret.fresh()}
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
