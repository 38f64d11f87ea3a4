"""Whether so many processes come together here, and how fast they talk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from lockstep.doctor.ask import Answer, Question
from lockstep.doctor.check import Check
from lockstep.doctor.dependencies import reinstall
from lockstep.doctor.units import duration, size

# A barrier takes a fraction of a millisecond on loopback; beyond this, ranks wait for a core rather than each other.
_SLOW_BARRIER_SECONDS = 0.02


def look(count: int, family: str, limit: float) -> Iterator[Check]:
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder,
        Question("processes", count, family, folder, limit, limit=limit) as question,
    ):
        yield from judge(question.answer(), count, family)


def judge(answer: Answer, count: int, family: str) -> Iterator[Check]:
    name = f"processes on {family}"
    facts = answer.value
    if facts is None:
        late = "start fewer, or give a slow machine more time with --limit"
        others = "see to the checks above that failed first, then to what this message names"
        remedy = late if answer.late else reinstall(answer.module) or others
        yield Check(name, "fail", answer.trouble, remedy)
        return
    ranks = facts["ranks"]
    data = {"processes": count, "seconds": facts["seconds"], "ranks": ranks}
    wrong = [str(rank) for rank, each in enumerate(ranks) if not each.get("correct", True)]
    if wrong:
        remedy = "the data plane gives wrong numbers: check the devices, and the interconnect between them"
        yield Check(name, "fail", f"a sum over all ranks came out wrong on rank {', '.join(wrong)}", remedy, data)
        return
    came = "1 process ran" if count == 1 else f"{count} processes came together"
    yield Check(name, "ok", f"{came}, start to end in {duration(facts['seconds'])}", data=data)
    if count > 1:
        yield latency(max(each["latency"] for each in ranks), max(each["barrier"] for each in ranks))
        yield bandwidth({int(key): max(each["seconds"][key] for each in ranks) for key in ranks[0]["seconds"]})


def latency(all_reduce: float, barrier: float) -> Check:
    found = f"all_reduce of 4 bytes {duration(all_reduce)}, barrier {duration(barrier)} (medians)"
    data = {"all_reduce_seconds": all_reduce, "barrier_seconds": barrier}
    if max(all_reduce, barrier) > _SLOW_BARRIER_SECONDS:
        remedy = "ranks wait for a core: use fewer processes or threads (launch.threads), or end what else runs here"
        return Check("latency", "warn", found, remedy, data)
    return Check("latency", "ok", found, data=data)


def bandwidth(seconds: dict[int, float]) -> Check:
    """Algorithm bandwidth: bytes of one rank's tensor per second, whatever the library sends for it."""
    rates: dict[int, Any] = {count: count / each / 1e9 for count, each in seconds.items()}
    shown = ", ".join(f"{size(count)} at {rate:.3g} GB/s" for count, rate in rates.items())
    data = {"gigabytes_per_second": {str(count): rate for count, rate in rates.items()}}
    return Check("bandwidth", "ok", f"all_reduce of {shown}", data=data)
