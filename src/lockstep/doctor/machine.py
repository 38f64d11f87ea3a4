"""What this process may use of the machine: cores, memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.doctor.check import Check
from lockstep.doctor.units import MIB, size
from lockstep.launcher import cgroup
from lockstep.launcher.plan import available_cores

# The variables that change what a run does here; no other is ever shown.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PJRT_DEVICE")
_SHARED_MEMORY = Path("/dev/shm")

# A process that has torch loaded and a small model in training.
_PROCESS_BYTES = 512 * MIB
# What containers are given unless they ask for more is 64 MiB, which a few batches fill.
_ROOMY_SHARED_MEMORY = 512 * MIB
# The locks of the processes that are started live there.
_LEAST_SHARED_MEMORY = 1 * MIB
# Every tensor on its way from a data worker is an open file.
_FILES_FOR_DATA_WORKERS = 1024


def look(processes: int) -> Iterator[Check]:
    """What `processes` processes need, against what there is."""
    yield variables(os.environ)
    yield cores(available_cores(), os.cpu_count() or 1, cgroup.core_limit(), processes)
    yield memory(*_memory(), cgroup.memory_limit(), processes)
    yield shared_memory(*_shared_memory())
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), processes)


def variables(env: Mapping[str, str]) -> Check:
    found = {name: env[name] for name in VARIABLES if name in env}
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    return Check("variables", "ok", shown or "none is set that changes a run", data=found)


def cores(usable: int, present: int, limit: float | None, processes: int) -> Check:
    found = f"{usable} of {present} may be used" + (f", for {limit:g} cores' worth of time" if limit else "")
    data = {"usable": usable, "present": present, "limit": limit}
    worth = min(usable, limit or usable)
    if processes > worth:
        remedy = f"{processes} processes will take turns on {worth:g} cores: use fewer, or allow more cores"
        return Check("cores", "warn", found, remedy, data)
    if worth < usable:
        remedy = f"the limit is not seen when threads are counted: set launch.threads to {max(1, int(worth))} or less"
        return Check("cores", "warn", found, remedy, data)
    return Check("cores", "ok", found, data=data)


def memory(total: int, available: int | None, limit: int | None, processes: int) -> Check:
    """`available` is unknown on some systems; `limit` is that of a container."""
    usable = min(each for each in (total, available, limit) if each is not None)
    parts = [f"{size(available)} of {size(total)} available" if available is not None else size(total)]
    parts += [f"limited to {size(limit)}"] if limit is not None and limit < total else []
    data = {"total": total, "available": available, "limit": limit}
    needed = processes * _PROCESS_BYTES
    if usable >= needed:
        return Check("memory", "ok", ", ".join(parts), data=data)
    remedy = f"{processes} processes with torch and a small model take about {size(needed)}: end others, or use fewer"
    return Check("memory", "warn", ", ".join(parts), remedy, data)


def shared_memory(total: int | None, free: int, problem: str) -> Check:
    """`total` is None on a system that passes batches in another way."""
    name = "shared memory"
    if total is None:
        return Check(name, "none", "not a file system here")
    found, data = f"{size(free)} of {size(total)} free", {"total": total, "free": free}
    larger = "in a container, start it with --ipc=host or --shm-size=8g"
    if problem or free < _LEAST_SHARED_MEMORY:
        remedy = f"processes cannot be started without it; make room in {_SHARED_MEMORY}, or {larger}"
        return Check(name, "fail", f"{found}: {problem or 'full'}", remedy, data)
    if free < _ROOMY_SHARED_MEMORY:
        return Check(
            name, "warn", found, f"data.workers pass batches through it: {larger}, or use data.workers=0", data
        )
    return Check(name, "ok", found, data=data)


def files_needed(processes: int) -> int:
    """Open files of the process that has most: the launcher was measured at 37 + 5 N, a rank at 34 + 4 N."""
    return 48 + 6 * processes


def open_files(soft: int, hard: int, processes: int) -> Check:
    needed = files_needed(processes)
    unlimited = resource.RLIM_INFINITY
    found = "no limit" if soft == unlimited else f"limit {soft}"
    found += f"; {f'{processes} processes need' if processes > 1 else '1 process needs'} about {needed}"
    data = {"soft": soft, "hard": hard, "needed": needed}
    wanted = max(needed, _FILES_FOR_DATA_WORKERS)
    if soft == unlimited or soft >= wanted:
        return Check("open files", "ok", found, data=data)
    may = hard == unlimited or hard >= wanted
    remedy = f"ulimit -n {wanted}" + ("" if may else f" (the hard limit is {hard}: an administrator has to raise it)")
    if soft < needed:
        return Check("open files", "fail", found, remedy, data)
    return Check("open files", "warn", found, f"{remedy}; data workers need one for every tensor under way", data)


def _memory() -> tuple[int, int | None]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return total, None
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    available = kibibytes.get("MemAvailable")
    return total, None if available is None else available * 1024


def _shared_memory() -> tuple[int | None, int, str]:
    if not _SHARED_MEMORY.is_dir():
        return None, 0, ""
    usage = shutil.disk_usage(_SHARED_MEMORY)
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            file.write(b"lockstep")
            file.flush()
    except OSError as error:
        return usage.total, usage.free, f"cannot be written: {error.strerror}"
    return usage.total, usage.free, ""
