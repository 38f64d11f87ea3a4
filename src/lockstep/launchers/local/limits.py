"""Limits of this host: cores, memory and processes, by the control groups of this process and the system."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lockstep.errors import ConfigError

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_COUNTERS = Path("/proc/vmstat")
# Version 1 writes a number of this order where there is no limit.
_UNLIMITED = 2**60


def core_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Returns the tightest limit of cores of this group and those above it, or None."""
    texts = _read(root, membership, "", "cpu.max")
    quotas = _read(root, membership, "cpu", "cpu.cfs_quota_us")
    periods = _read(root, membership, "cpu", "cpu.cfs_period_us")
    texts += [f"{quota} {period}" for quota, period in zip(quotas, periods, strict=False)]
    return min((cores for text in texts if (cores := _cores(text)) is not None), default=None)


def memory_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    texts = _read(root, membership, "", "memory.max")
    texts += _read(root, membership, "memory", "memory.limit_in_bytes")
    return min((limit for text in texts if (limit := _bytes(text)) is not None), default=None)


def kills_for_memory(counters: Path = _COUNTERS) -> int:
    """Returns how many processes of this machine the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def process_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    texts = _read(root, membership, "", "pids.max") + _read(root, membership, "pids", "pids.max")
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _cores(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _bytes(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _read(root: Path, membership: Path, controller: str, file: str) -> list[str]:
    """Reads a file of this process's group and of every group above it; in version 2, the controller has no name."""
    texts = []
    for folder in _folders(root, membership, controller):
        with contextlib.suppress(OSError):
            texts.append((folder / file).read_text(encoding="utf-8").strip())
    return texts


def _folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    # In a container the path may be the host's, which does not exist here; the limit is then at the root.
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            group = PurePosixPath(path)
            for each in (group, *group.parents):
                yield root / controller / str(each).lstrip("/")


# Every rank needs a port.
_PORTS = 65_535
# With fewer open files than this torch cannot even be imported, or its store not be opened.
_FILES = 50
_PID_MAX = Path("/proc/sys/kernel/pid_max")


def check(processes: int, workers: int = 0) -> None:
    """Refuses more ranks, or data workers, than this host can have."""
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
    """Returns the tightest limit of processes, and its name."""
    limits = [(_PORTS, "the ports of a host")]
    with contextlib.suppress(OSError, ValueError):
        limits.append((int(_PID_MAX.read_text(encoding="utf-8")), "kernel.pid_max"))
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not held to it
        limits.append((most, "ulimit -u"))
    if (allowed := process_limit()) is not None:
        limits.append((allowed, "pids.max of its control group"))
    return min(limits)
