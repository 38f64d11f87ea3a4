"""Reads which task this process is from the variables of srun. A single task starts the processes of a run itself."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import TopologyError

_MOST = 1_000_000  # nodes; a range in an environment variable must not fill the memory
_SHORT = "n[1-2,07-09],gpu4"


def nodes(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Expands a node list like `scontrol show hostnames`."""
    found: list[str] = []
    for part in _split(text, name):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # what is between brackets is at odd places
        if any(bracket in piece for piece in pieces for bracket in "[]") or not part:
            raise _wrong(text, name)
        choices = [_numbers(each, text, name) if at % 2 else [each] for at, each in enumerate(pieces)]
        if math.prod(map(len, choices)) + len(found) > _MOST:
            raise TopologyError(f"{name}={text!r} stands for more than {_MOST} nodes")
        found += map("".join, itertools.product(*choices))
    return found


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if found is None or int(found[2] or 1) + len(counts) > _MOST:
            raise TopologyError(f"{name}={text!r} does not say how many tasks every node has, as 2(x3),1 does")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str, name: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _wrong(text, name)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _numbers(inside: str, text: str, name: str) -> list[str]:
    """Expands `1-2,07-09` to 1, 2, 07, 08, 09."""
    found: list[str] = []
    for part in inside.split(","):
        ends = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if ends is None:
            raise _wrong(text, name)
        first, last = ends[1], ends[2] or ends[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise _wrong(text, name)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, name: str) -> TopologyError:
    return TopologyError(f"{name}={text!r} is not a list of nodes, such as {_SHORT}")


ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
_SLURM_STEP = "SLURM_STEP_ID"
# Below the ephemeral ports.
_FIRST_PORT, _PORTS = 15_000, 15_000


@dataclass(frozen=True)
class BatchTask:
    """One of several processes started by a batch system, and where they meet."""

    starter: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host_index: int
    hosts: int
    address: str
    port: int
    host: str | None = None  # its name in the batch system
    per_host: tuple[int, ...] | None = None
    attempt: int = 0

    @property
    def spread(self) -> str:
        counts = ", ".join(map(str, self.per_host or ()))
        where = f" ({f'{counts} ' if counts else ''}on {self.hosts} hosts)" if self.hosts > 1 else ""
        return f"{self.size} tasks of {self.starter}{where}"


def batch_task(env: Mapping[str, str]) -> BatchTask | None:
    """Returns the task that this process is, or None if it is alone."""
    # Both start servers with srun, whose variables their processes inherit; srun may set PMI's itself.
    _refuse_mpi(env, "OMPI_COMM_WORLD_RANK", *(["PMI_RANK"] if "MPI_LOCALNRANKS" in env else []))
    if "OMPI_COMM_WORLD_RANK" in env:
        return None
    # A batch script has the variables of the job as well, but no step.
    if _SLURM_STEP in env and (rank := _whole(env.get("SLURM_PROCID"))) is not None:
        return _task_of_srun(env, rank)
    _refuse_mpi(env, "PMI_RANK", "PMIX_RANK")
    return None


def names() -> set[str]:
    return {
        _SLURM_STEP, "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
        "MPI_LOCALNRANKS",
    }  # fmt: skip


def _task_of_srun(env: Mapping[str, str], rank: int) -> BatchTask | None:
    size = _whole(env.get("SLURM_STEP_NUM_TASKS")) or _whole(env.get("SLURM_NTASKS"))
    if size is None:
        raise TopologyError(
            f"this is process {rank} that srun started (SLURM_PROCID={rank}), but nothing says of how many "
            "(SLURM_STEP_NUM_TASKS is not set), so that each of them would train a run of its own. Start one, which "
            "starts a process per device of its host; or use srun or torchrun"
        )
    if size == 1:
        return None
    counts = tasks_per_node(_required(env, "SLURM_STEP_TASKS_PER_NODE", "srun"))
    listed = nodes(_required(env, "SLURM_STEP_NODELIST", "srun"))
    node, local_rank = (_number(env, name, "srun") for name in ("SLURM_NODEID", "SLURM_LOCALID"))
    if sum(counts) != size or len(counts) != len(listed) or node >= len(counts):
        raise TopologyError(
            f"SLURM's variables contradict each other: SLURM_STEP_NUM_TASKS={size}, SLURM_NODEID={node}, "
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}, "
            f"SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']}. They are those of another step: start the command with "
            "srun, and do not set them by hand"
        )
    return BatchTask(
        "srun", rank, size, local_rank, counts[node], node, len(listed),
        address=env.get(ADDRESS) or (listed[0] if len(listed) > 1 else "127.0.0.1"),
        port=_port(env, f"{env.get('SLURM_JOB_ID', '')}.{env[_SLURM_STEP]}"),
        host=listed[node],
        per_host=tuple(counts),
        attempt=_whole(env.get("SLURM_RESTART_COUNT")) or 0,
    )  # fmt: skip


def _refuse_mpi(env: Mapping[str, str], *names: str) -> None:
    """Refuses one of several processes of mpirun or mpiexec: each would train a run of its own."""
    for name in names:
        rank, size = _whole(env.get(name)), _whole(env.get(name.replace("RANK", "SIZE")))
        if rank is not None and size != 1:
            raise TopologyError(
                f"an MPI launcher started this process ({name}={rank}), and Lockstep does not read ranks from MPI: "
                "start it with srun or torchrun, or give each process its place: RANK, WORLD_SIZE, LOCAL_RANK, "
                "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            )


def _required(env: Mapping[str, str], name: str, starter: str) -> str:
    text = env.get(name)
    if not text:
        raise TopologyError(f"{starter} started this process as one of several, but {name} is not set")
    return text


def _number(env: Mapping[str, str], name: str, starter: str) -> int:
    found = _whole(text := _required(env, name, starter))
    if found is None:
        raise TopologyError(f"{name}={text!r} in the environment is not a whole number")
    return found


def _port(env: Mapping[str, str], job: str) -> int:
    """Returns MASTER_PORT, or a port derived from the job that all its processes agree on."""
    if (text := env.get(PORT)) is not None:
        return _number(env, PORT, text)
    return _FIRST_PORT + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4]) % _PORTS


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None
