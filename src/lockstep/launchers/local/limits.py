"""How many cores this process may use, by its control groups, and what the kernel killed for lack of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_COUNTERS = Path("/proc/vmstat")


def core_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Returns the tightest limit of cores of this group and those above it, or None."""
    texts = _read(root, membership, "", "cpu.max")
    quotas = _read(root, membership, "cpu", "cpu.cfs_quota_us")
    periods = _read(root, membership, "cpu", "cpu.cfs_period_us")
    texts += [f"{quota} {period}" for quota, period in zip(quotas, periods, strict=False)]
    return min((cores for text in texts if (cores := _cores(text)) is not None), default=None)


def kills_for_memory(counters: Path = _COUNTERS) -> int:
    """Returns how many processes of this machine the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _cores(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


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
