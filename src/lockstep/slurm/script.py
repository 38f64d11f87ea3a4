"""The script of a batch job: one command for the first start and for every one after it.

SLURM sends SIGTERM to the ranks before the time limit; they save and leave with exit code 75, and the job queues again.
A signal that reaches this script too is one to the whole job (scancel, preemption, the limit itself): then SLURM
decides what becomes of the job, and one that was cancelled must not come back.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

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


def of_run(srun: Sequence[str], python: Sequence[str], folder: str, requeue: bool, saved: int) -> str:
    after = _REQUEUE.format(saved=saved, job="$SLURM_JOB_ID") if requeue else ""
    return _RUN.format(run=shlex.quote(folder), srun=shlex.join(srun), python=shlex.join(python), after=after)


def of_sweep(srun: Sequence[str], python: Sequence[str], folder: str, requeue: bool, saved: int) -> str:
    """Every task of the array has a folder of its own, by its number; the last to end leaves the whole table."""
    # By the array's number and its own: its job number alone may be that of the whole array.
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    run = shlex.quote(f"{folder}/trial-") + '"$(printf %05d "$SLURM_ARRAY_TASK_ID")"'
    after = _REQUEUE.format(saved=saved, job=job) if requeue else ""
    after += _TABLE.format(python=shlex.join(python), folder=shlex.quote(folder))
    return _RUN.format(run=run, srun=shlex.join(srun), python=shlex.join(python), after=after)
