"""`python -m lockstep.planner.explain check|failed CONFIG`: a resolved config's plan on the devices of this machine.

Lines for people on standard output. Exit code 0: it fits; 1: it does not, and what would make it fit is said; 2: no
plan could be made, and why is said. A process of its own, so that whoever wants to know never loads torch, and can end
it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError
from lockstep.planner import here, remedies
from lockstep.planner.figures import KINDS
from lockstep.planner.plan import GIB, RESERVED, NotPlanned, Plan
from lockstep.planner.remedies import OFF_BY, size
from lockstep.planner.roofline import estimate
from lockstep.planner.table import WHEN
from lockstep.planner.traces import NO_TIME, Traces

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
    target = here.target(config, host_memory, allowed)
    (step,) = trace([[]])
    if isinstance(step, str):
        raise NotPlanned(f"tracing a step of it took too long: {step}" if step == NO_TIME else step)
    return Plan(target, step, estimate(step, target, config.train.precision), None, False)


def _checked(plan: Plan, config: RunConfig, file: Path, trace: Traces) -> Iterator[str]:
    if plan.fits:
        yield f"a step needs {size(plan.step.peak)} of {_memory(plan)}, and fits{_narrowly(plan)}"
        return
    yield f"DOES NOT FIT: {_needs(plan)}"
    yield from _kinds(plan)
    yield from remedies.lines(remedies.find(plan, config, trace), plan)


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
            "task or its hooks keep, data workers, other processes, or a memory in pieces "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    yield from remedies.lines(remedies.find(plan, config, trace), plan)
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
