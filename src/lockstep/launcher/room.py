"""How many processes this host can have at all: more are refused before any is started."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launcher import cgroup

# Every rank meets the others at a port of its own, and a host has no more of them.
_PORTS = 65_535
# With fewer open files than this torch cannot even be imported, or its store not be opened.
_FILES = 50
_PID_MAX = Path("/proc/sys/kernel/pid_max")


def check(processes: int, workers: int = 0) -> None:
    """Refuse a number of ranks, and of data workers for each, that cannot be."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FILES:
        raise ConfigError(f"a process may have {files} open files here, and a run needs {_FILES}: ulimit -n {_FILES}")
    most, why = limit()
    if processes > most:
        raise ConfigError(f"processes: {processes} is more than this host can have: at most {most} ({why})")
    if processes * (1 + workers) > most:
        raise ConfigError(
            f"data.workers: {workers} for each of {processes} processes is more than this host can have: at most "
            f"{most} processes in all ({why})"
        )


def limit() -> tuple[int, str]:
    """The tightest of the limits that hold here, and what it is called."""
    limits = [(_PORTS, "the ports of a host")]
    with contextlib.suppress(OSError, ValueError):
        limits.append((int(_PID_MAX.read_text(encoding="utf-8")), "kernel.pid_max"))
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not held to it
        limits.append((most, "ulimit -u"))
    if (allowed := cgroup.process_limit()) is not None:
        limits.append((allowed, "pids.max of its control group"))
    return min(limits)
