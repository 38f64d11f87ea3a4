"""What this process may use of the machine: cores, memory, open files, loopback, the disk or bucket, the clock."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import GIB, MIB, Check, duration, size
from lockstep.launchers.local import limits
from lockstep.launchers.plan import available_cores

# The variables that change what a run does here; no other is ever shown.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PJRT_DEVICE")
_PROCESS_BYTES = 512 * MIB  # with torch loaded and a small model in training
_SHARED_MEMORY = Path("/dev/shm")
_ROOMY_SHARED_MEMORY = 512 * MIB  # containers get 64 MiB by default, which a few batches fill
_LEAST_SHARED_MEMORY = 1 * MIB  # for the locks of the processes that are started
_FILES_FOR_DATA_WORKERS = 1024  # every tensor on its way from a data worker is an open file
_CONNECT_SECONDS = 5.0
_SAMPLE_BYTES = 4 * MIB
_ROOMY_DISK = 1 * GIB
_SLOW_WRITE_SECONDS = 2.0
# Archives hold times without a zone, so the files of a package may seem to be from later today.
_ZONE_SECONDS = 24 * 3600.0
_JUMP_SECONDS = 0.5


def look(processes: int) -> Iterator[Check]:
    yield variables(os.environ)
    yield cores(available_cores(), os.cpu_count() or 1, limits.core_limit(), processes)
    yield memory(*_memory(), limits.memory_limit(), processes)
    yield shared_memory(*_shared_memory())
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), processes)


def variables(env: Mapping[str, str]) -> Check:
    found = {name: env[name] for name in VARIABLES if name in env}
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    return Check("variables", "ok", shown or "none is set that changes a run", data=found)


def cores(usable: int, present: int, limit: float | None, processes: int) -> Check:
    found = f"{usable} of {present} may be used" + (f", for {limit:g} cores' worth of time" if limit else "")
    worth, remedy = min(usable, limit or usable), ""
    if processes > worth:
        remedy = f"{processes} processes will take turns on {worth:g} cores: use fewer, or allow more cores"
    elif worth < usable:
        remedy = f"the limit is not seen when threads are counted: set launch.threads to {max(1, int(worth))} or less"
    data = {"usable": usable, "present": present, "limit": limit}
    return Check("cores", "warn" if remedy else "ok", found, remedy, data)


def memory(total: int, available: int | None, limit: int | None, processes: int) -> Check:
    """`available` is unknown on some systems; `limit` is that of a container."""
    usable = min(each for each in (total, available, limit) if each is not None)
    found = f"{size(available)} of {size(total)} available" if available is not None else size(total)
    found += f", limited to {size(limit)}" if limit is not None and limit < total else ""
    needed, remedy = processes * _PROCESS_BYTES, ""
    if usable < needed:
        remedy = (
            f"{processes} processes with torch and a small model take about {size(needed)}: end others, or use fewer"
        )
    data = {"total": total, "available": available, "limit": limit}
    return Check("memory", "warn" if remedy else "ok", found, remedy, data)


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
        remedy = f"data.workers pass batches through it: {larger}, or use data.workers=0"
        return Check(name, "warn", found, remedy, data)
    return Check(name, "ok", found, data=data)


def open_files(soft: int, hard: int, processes: int) -> Check:
    needed = 48 + 6 * processes  # the launcher was measured at 37 + 5 N, a rank at 34 + 4 N
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
    return total, next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _shared_memory() -> tuple[int | None, int, str]:
    if not _SHARED_MEMORY.is_dir():
        return None, 0, ""
    usage, problem = shutil.disk_usage(_SHARED_MEMORY), ""
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            file.write(b"lockstep")
            file.flush()
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    return usage.total, usage.free, problem


# Whether processes on this host can meet


def network() -> Check:
    interfaces = [name for _, name in socket.if_nameindex()]
    return ports(port_problem(), interfaces, os.environ.get("GLOO_SOCKET_IFNAME"))


def ports(problem: str, interfaces: list[str], chosen: str | None) -> Check:
    """`chosen` is what GLOO_SOCKET_IFNAME says; without it, the launcher has gloo use loopback."""
    data = {"interfaces": interfaces}
    if problem:
        remedy = "ranks meet on 127.0.0.1: bring the loopback interface up, and let the firewall pass it"
        return Check("ports", "fail", f"127.0.0.1: {problem}", remedy, data)
    wanted = chosen.split(",") if chosen else ["lo0" if sys.platform == "darwin" else "lo"]
    absent = [name for name in wanted if name not in interfaces]
    if absent:
        remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}" + (", or unset it" if chosen else "")
        return Check("ports", "fail", f"there is no network interface {absent[0]}, which gloo is to use", remedy, data)
    return Check("ports", "ok", f"a port on 127.0.0.1 opens and answers; gloo uses {', '.join(wanted)}", data=data)


def port_problem() -> str:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), _CONNECT_SECONDS),
        ):
            return ""
    except OSError as error:
        return str(error.strerror or error)


def look_up(stage: Stage, host: str) -> dict[str, Any]:
    """Runs in a subprocess: a name server may take its time."""
    stage(f"looking up the address of {host}")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "problem": str(error.strerror or error)}
    foreign = [str(address[0]) for family, _, _, _, address in found if not _is_ours(family, address)]
    problem = f"{foreign[0]} is not an address of this machine" if foreign else ""
    return {"addresses": sorted({str(address[0]) for *_, address in found}), "problem": problem}


def hostname(host: str, answer: Answer) -> Check:
    facts = answer.value or {"addresses": [], "problem": answer.problem}
    found = f"{host} is {', '.join(facts['addresses']) or 'unknown'}"
    data = {"hostname": host, "addresses": facts["addresses"]}
    if not facts["problem"]:
        return Check("hostname", "ok", found, data=data)
    remedy = (
        f"runs on this host alone do not need it; for torchrun and for several hosts, give {host} an address in "
        "/etc/hosts, or name the interface to use in GLOO_SOCKET_IFNAME"
    )
    return Check("hostname", "warn", f"{found}: {facts['problem']}", remedy, data)


def _is_ours(family: int, address: Any) -> bool:
    """Only an address of this machine can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


# Whether runs can be written where they are to go


def write_to_disk(stage: Stage, out: str) -> dict[str, Any]:
    """Runs in a subprocess: a network disk that is gone blocks every access."""
    stage(f"looking for {out}")
    path = Path(out).absolute()
    folder = next(each for each in (path, *path.parents) if each.exists())
    usage, seconds, problem = shutil.disk_usage(folder), None, ""
    stage(f"writing {size(_SAMPLE_BYTES)} in {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            sample = os.urandom(_SAMPLE_BYTES)  # which no file system can make smaller
            began = time.perf_counter()
            file.write(sample)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    except OSError as error:
        problem = str(error.strerror or error)
    return {"folder": str(folder), "total": usage.total, "free": usage.free, "seconds": seconds, "problem": problem}


def judge_disk(answer: Answer) -> Check:
    facts = answer.value
    if facts is None:
        return Check("disk", "fail", answer.problem, "name a folder on a disk that answers with --out")
    found = f"{size(facts['free'])} of {size(facts['total'])} free in {facts['folder']}"
    if facts["problem"]:
        remedy = "make room, or name another folder with --out"
        return Check("disk", "fail", f"{found}: cannot be written: {facts['problem']}", remedy, facts)
    found += f"; {size(_SAMPLE_BYTES)} reach it in {duration(facts['seconds'])}"
    remedy = ""
    if facts["free"] < _ROOMY_DISK:
        remedy = "checkpoints may not fit: make room, or lower checkpoint.keep"
    elif facts["seconds"] > _SLOW_WRITE_SECONDS:
        remedy = "checkpoints will be slow: name a folder on a local disk with --out"
    return Check("disk", "warn" if remedy else "ok", found, remedy, facts)


def write_to_bucket(stage: Stage, url: str) -> dict[str, Any]:
    """Runs in a subprocess: a service that does not answer blocks the caller."""
    from lockstep.mirror.bucket import Bucket
    from lockstep.mirror.url import parse

    stage(f"writing to {url}")
    began = time.perf_counter()
    Bucket(parse(url, "--out")).probe("--out")
    return {"url": url, "seconds": time.perf_counter() - began}


def judge_bucket(answer: Answer) -> Check:
    if answer.value is None:
        remedy = "" if answer.problem.startswith("--out") else "check the network, or name another place with --out"
        return Check("bucket", "fail", answer.problem, remedy)
    took = duration(answer.value["seconds"])
    found = f"{answer.value['url']} can be written, listed, read and deleted from; one object takes {took}"
    return Check("bucket", "ok", found, data=answer.value)


# Whether the clock is right


def clock_offset() -> float:
    """Returns the difference between the wall clock and the monotonic one."""
    return time.time() - time.monotonic()


def clock(began: float) -> Check:
    """`began` is the offset at the start."""
    specs = [importlib.util.find_spec(package) for package in ("lockstep", "torch")]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    newest = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    return judge_clock(time.time(), newest, clock_offset() - began)


def judge_clock(now: float, installed: float, jump: float) -> Check:
    """Compares the clock with when the newest package was installed, and with how far it jumped meanwhile."""
    found, wrong = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)), ""
    if now < installed - _ZONE_SECONDS:
        wrong = f", but what is installed here is from {time.strftime('%Y-%m-%d', time.localtime(installed))}"
    elif abs(jump) > _JUMP_SECONDS:
        wrong = f", and jumped by {jump:+.1f} s while this ran"
    remedy = "set the clock, and keep it by NTP or chrony: logs, run folders and certificates go by it" if wrong else ""
    return Check("clock", "warn" if wrong else "ok", found + wrong, remedy, {"time": now, "jump_seconds": jump})
