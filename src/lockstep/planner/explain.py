"""`python -m lockstep.planner.explain check|failed CONFIG`: plans a resolved config on the devices of this machine.

Prints lines for people. Exit code 0: it fits; 1: it does not fit, and the output says what would; 2: no plan could be
made. It runs in a separate process, which the caller can kill and which loads torch for it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError
from lockstep.planner import fixes
from lockstep.planner.devices import Device, Target, known
from lockstep.planner.figures import KINDS, estimate
from lockstep.planner.fixes import OFF_BY, size
from lockstep.planner.plan import GIB, RESERVED, WHEN, Plan
from lockstep.planner.traces import NO_TIME, NotPlanned, Traces

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
    """Returns the devices the config will use, sized to the smallest one.

    `host_memory` is the limit of all processes of the host in bytes, `allowed` what torch allowed one process.
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
    """Returns the known device with this name and the nearest memory; an unknown one keeps its name."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    named = {each: device for each, device in devices.items() if each.split("-")[0] in words}

    def distance(each: str) -> tuple[float, bool]:
        return round(abs(devices[each].memory - memory)), ("pcie" in words) is not ("pcie" in each)

    nearest = min(named or devices, key=distance)
    return (nearest if named else re.sub(r"\W+", "-", name.lower()).strip("-")), devices[nearest]


def _of_a_process(count: int, host_memory: int | None) -> float:
    """Returns the memory for tensors of one process, plus what a plan reserves."""
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
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _gpus(most: int) -> list[Gpu]:
    """Asks a new process: this one must not use CUDA memory or fork after CUDA was initialised."""
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


_LARGEST, _LONGEST_LINE = 4, 100
_WORTH_SAYING = 0.005  # of the peak
_LAST_WORDS_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("why", choices=("check", "failed"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--host-memory", type=int, default=None)
    parser.add_argument("--allowed", type=int, default=None)
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + asked.seconds
    # Whoever started this may be gone, and nobody else would end it.
    signal.alarm(int(asked.seconds + _LAST_WORDS_SECONDS))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        config = load(asked.config)
        trace = Traces(asked.config, [], int(config.processes), deadline)
        plan = _planned(config, trace, asked.host_memory, asked.allowed)
        for line in (_checked if asked.why == "check" else _failed)(plan, config, asked.config, trace):
            print(line, flush=True)
    except LockstepError as error:
        print(str(error).split("\n")[0])
        return 2
    return 0 if plan.fits else 1


def _planned(config: RunConfig, trace: Traces, host_memory: int | None, allowed: int | None) -> Plan:
    there = target(config, host_memory, allowed)
    (step,) = trace([[]])
    if isinstance(step, str):
        raise NotPlanned(f"tracing a step of it took too long: {step}" if step == NO_TIME else step)
    return Plan(there, step, estimate(step, there, config.train.precision), None, False)


def _checked(plan: Plan, config: RunConfig, file: Path, trace: Traces) -> Iterator[str]:
    if plan.fits:
        yield f"a step needs {size(plan.step.peak)} of {_memory(plan)}, and fits{_narrowly(plan)}"
        return
    yield f"DOES NOT FIT: {_needs(plan)}"
    yield from _kinds(plan)
    yield from fixes.lines(fixes.find(plan, config, trace), plan)


def _failed(plan: Plan, config: RunConfig, file: Path, trace: Traces) -> Iterator[str]:
    yield _needs(plan)
    yield from _kinds(plan)
    yield "  the largest tensors then:"
    for each in plan.step.largest[:_LARGEST]:
        shape = " x ".join(map(str, each.shape))
        line = each.line if len(each.line) <= _LONGEST_LINE else f"{each.line[:_LONGEST_LINE]} ..."
        yield f"    {size(each.bytes):>10}  {each.kind:<13} {shape} {each.dtype}  {line}".rstrip()
    if plan.fits and _narrowly(plan):
        yield f"so a step fits{_narrowly(plan)}"
    elif plan.fits:
        yield (
            "so a step fits, and memory ran out by what is no part of one: validation (validate.batch_size), what the "
            "task or its callbacks keep, data workers, other processes, or a memory in pieces "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    yield from fixes.lines(fixes.find(plan, config, trace), plan)
    if config.runtime == "cuda":
        yield f"all of the plan: lockstep plan {file} --on {plan.target.title}"


def _narrowly(plan: Plan) -> str:
    narrow = plan.step.peak > plan.capacity * (1 - OFF_BY)
    return f", by less than the {OFF_BY:.0%} that plans are off" if narrow else ""


def _needs(plan: Plan) -> str:
    margin = f"{size(plan.margin)} are left" if plan.fits else f"{size(-plan.margin)} too much"
    return f"a step needs {size(plan.step.peak)} at its peak in {WHEN[plan.step.phase]}, of {_memory(plan)}: {margin}"


def _memory(plan: Plan) -> str:
    target = plan.target
    if target.device.vendor == "host":
        each = f"each of {target.count} processes" if target.count > 1 else "a process"
        return f"the {size(plan.capacity)} that {each} has for tensors here"
    each = f"each of {target.count} {target.name} has" if target.count > 1 else f"the {target.name} has"
    return f"the {size(target.device.memory * GIB)} that {each}, {RESERVED / GIB:.1f} of them for the driver"


def _kinds(plan: Plan) -> Iterator[str]:
    for kind in KINDS:
        held = plan.step.by_kind.get(kind, 0)
        if held > _WORTH_SAYING * plan.step.peak:
            yield f"    {size(held):>10}  {kind}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
