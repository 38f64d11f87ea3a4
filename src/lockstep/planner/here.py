"""The devices of this machine as a target: for a plan before a run, and after one that did not fit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.schema import RunConfig
from lockstep.planner.devices import Device, Target, known
from lockstep.planner.plan import GIB, RESERVED, NotPlanned

_ASK_SECONDS = 60.0
_OF_ITSELF = 0.3 * GIB  # what a process with torch has on the host without any tensor
_OF_THREADS = 1.4 * GIB  # addresses that a rank's threads have taken beside those (measured, glibc)
# What says which of two remedies takes longer: one core's worth of a usual host, and memory for all of them.
_HOST = {"vendor": "host", "peak": {"float32": 0.1}, "bandwidth": 20, "link": 10, "network": 1}


class Gpu(NamedTuple):
    name: str
    total: int
    free: int  # for a process that uses it already


def target(config: RunConfig, host_memory: int | None = None, allowed: int | None = None) -> Target:
    """The devices that a resolved config uses here, all as small as the smallest of them.

    `host_memory` are the bytes that all processes of a host may have together; `allowed` what torch let one have.
    """
    count = int(config.processes)
    if config.runtime == "cpu":
        memory = _of_a_process(count, host_memory)
        return Target("host", Device.model_validate({**_HOST, "memory": memory / GIB, "per_host": count}), count)
    gpus = _gpus(count)
    smallest = min(gpus, key=lambda each: each.free)
    # Free is what is left beside the context of the process that asked, which is what a plan keeps back.
    memory = min(smallest.total, smallest.free + RESERVED) / -(-count // len(gpus))  # launch.share_devices
    if allowed is not None:
        memory = min(memory, allowed + RESERVED)
    gpus_known = {each: device for each, device in known().items() if device.vendor != "google"}
    name, device = like(smallest.name, smallest.total / GIB, gpus_known)
    found = device.model_copy(update={"memory": max(memory, 1.0) / GIB, "per_host": max(device.per_host, count)})
    return Target(name, found, count)


def like(name: str, memory: float, devices: Mapping[str, Device]) -> tuple[str, Device]:
    """The device that torch calls so, by its name and then its memory; of one that nobody knows, the figures are those
    of the one with the nearest memory, and the name is its own."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    named = {each: device for each, device in devices.items() if each.split("-")[0] in words}

    def distance(each: str) -> tuple[float, bool]:
        return round(abs(devices[each].memory - memory)), ("pcie" in words) is not ("pcie" in each)

    nearest = min(named or devices, key=distance)
    return (nearest if named else re.sub(r"\W+", "-", name.lower()).strip("-")), devices[nearest]


def _of_a_process(count: int, host_memory: int | None) -> float:
    """What its tensors can have, and what a plan keeps back of every device."""
    memory = min(_available(), host_memory or _available()) / count - _OF_ITSELF
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        # This process has torch loaded as a rank has, and no tensors.
        memory = min(memory, limit - _addresses() - _OF_THREADS)
    return max(memory, 0) + RESERVED


def _available() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _addresses() -> int:
    """Bytes of address space that this process has taken."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _gpus(most: int) -> list[Gpu]:
    """Asked by a new process: who has used CUDA has memory there and cannot be forked, and who was forked cannot use it
    where torch has looked for GPUs before."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    asking = context.Process(target=_tell_gpus, args=(sending, most), daemon=True)
    asking.start()
    sending.close()
    try:
        found = receiving.recv() if receiving.poll(_ASK_SECONDS) else f"no answer within {_ASK_SECONDS:g} s"
    except EOFError:
        found = "the process that asked them is gone"
    finally:
        asking.kill()
        asking.join()
    if isinstance(found, str) or not found:
        raise NotPlanned(f"the GPUs of this machine cannot be asked for their memory: {found or 'there are none'}")
    return [Gpu(*each) for each in found]


def _tell_gpus(sending: Any, most: int) -> None:
    import torch

    found = []
    try:
        for index in range(min(most, torch.cuda.device_count())):
            free, total = torch.cuda.mem_get_info(index)
            found.append((torch.cuda.get_device_name(index), total, free))
    except RuntimeError as error:
        sending.send(str(error).strip().split("\n")[0])
    else:
        sending.send(found)
