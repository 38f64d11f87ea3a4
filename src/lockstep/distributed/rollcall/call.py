"""The roll call: every rank reports through the store, rank 0 compares, and all ranks get its verdict.

It needs a connection from every rank to the store and none between ranks: three small messages per rank, one read per
rank by rank 0, and a question a second by every rank while some are late.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from lockstep import version
from lockstep.config.schema import RunSettings
from lockstep.distributed.activity import Activity, Beat, beat_key, encoded
from lockstep.distributed.group import Group
from lockstep.distributed.rendezvous import join
from lockstep.distributed.rollcall.report import (
    Evidence,
    Fault,
    Report,
    decoded,
    differences,
    digest,
    find_faults,
    render,
)  # fmt: skip
from lockstep.distributed.topology import Topology, ranks_text
from lockstep.errors import PeerLost, RankAbsent, RollCallError
from lockstep.runtime.base import Runtime

# Once something is wrong, how long the other ranks get to report.
_COMPLETE_SECONDS = 1.0
# How much longer than rank 0 the others wait for its verdict.
VERDICT_SECONDS = 5.0


def call(store: Any, mine: Report, evidence: Evidence, limit: float, share_devices: bool = False) -> list[Report]:
    """Reports this rank and waits for the verdict. Returns all reports on rank 0, and this rank's on the others."""
    if store is None or mine.world_size == 1:
        faults = find_faults([mine], 1, share_devices)
        if faults:
            raise RollCallError(render(faults, [mine]))
        return [mine]
    number = store.add("rollcall/arrivals", 1)
    # Read only if a digest differs.
    store.set(f"rollcall/evidence/{number}", encoded(asdict(evidence)))
    store.set(f"rollcall/report/{number}", encoded(asdict(mine)))
    if mine.rank != 0:
        if number > mine.world_size:
            _refuse_one_too_many(store, mine)
        _hear_verdict(store, mine, limit)
        return [mine]
    reports = _collect(store, max(number, mine.world_size), mine.world_size, limit)
    faults = find_faults(list(reports.values()), mine.world_size, share_devices)
    faults += differences(reports, lambda number: decoded(Evidence, store.read(f"rollcall/evidence/{number}")))
    verdict = _verdict(faults, list(reports.values()), _beats(store, faults))
    store.set("rollcall/verdict", json.dumps(verdict))
    if faults:
        _let_the_others_hear(store, len(reports) - 1)
        raise _error(*verdict)
    return sorted(reports.values(), key=lambda each: each.rank)


def _verdict(faults: list[Fault], reports: list[Report], beats: dict[int, Beat | None]) -> tuple[str, bool]:
    """Returns the message, empty if all is well, and whether ranks are only missing."""
    return render(faults, reports, beats) if faults else "", bool(faults) and all(fault.missing for fault in faults)


def _error(message: str, absent: bool) -> RollCallError:
    return RankAbsent(message) if absent else RollCallError(message)


def _collect(store: Any, count: int, world_size: int, limit: float) -> dict[int, Report]:
    """Collects reports until all have arrived, the limit has passed, or a fault is certain."""
    deadline, ranks = time.monotonic() + limit, set[int]()
    reports: dict[int, Report] = {}
    for number in range(1, count + 1):
        remaining = max(deadline - time.monotonic(), 0.001)
        data = store.read(f"rollcall/report/{number}")
        if data is None and not _wait(store, f"rollcall/report/{number}", remaining):
            continue  # later ones may have arrived
        reports[number] = decoded(Report, data or store.read(f"rollcall/report/{number}"))
        ranks.add(reports[number].rank)
        if reports[number].world_size != world_size or len(ranks) < len(reports):
            deadline = min(deadline, time.monotonic() + _COMPLETE_SECONDS)
    return reports


def _hear_verdict(store: Any, mine: Report, limit: float) -> None:
    if not _wait(store, "rollcall/verdict", limit + VERDICT_SECONDS):
        arrived = _arrived(store)
        faults = find_faults(arrived, mine.world_size, share_devices=True) or [
            Fault(f"rank 0 gave no verdict within {limit:g} s", (0,), missing=True)
        ]
        raise _error(*_verdict(faults, arrived, _beats(store, faults)))
    message, absent = json.loads(store.read("rollcall/verdict") or b"null")
    if message:
        store.add("rollcall/heard", 1)
        raise _error(message, absent)


def _let_the_others_hear(store: Any, others: int) -> None:
    """Keeps the store alive on rank 0 until the others have read the verdict."""
    deadline = time.monotonic() + VERDICT_SECONDS
    while store.add("rollcall/heard", 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


def _refuse_one_too_many(store: Any, mine: Report) -> None:
    arrived = _arrived(store)
    faults = find_faults(arrived, mine.world_size, share_devices=True)
    extra = Fault(f"{len(arrived)} processes arrived for a world of {mine.world_size}", ())
    raise RollCallError(render([extra, *faults], arrived))


def _arrived(store: Any) -> list[Report]:
    found = []
    for number in range(1, store.add("rollcall/arrivals", 0) + 1):
        if (data := store.read(f"rollcall/report/{number}")) is not None:
            found.append(decoded(Report, data))
    return found


def _beats(store: Any, faults: list[Fault]) -> dict[int, Beat | None]:
    """Returns the last heartbeats of missing ranks."""
    missing = {rank for fault in faults if fault.missing for rank in fault.ranks}
    return {rank: Beat.decode(store.read(beat_key(rank))) for rank in sorted(missing)}


def _wait(store: Any, key: str, seconds: float) -> bool:
    try:
        return bool(store.wait([key], seconds))
    except RuntimeError as error:
        raise PeerLost(f"lost the connection to the store during the roll call: {error}") from None


def hold(
    topology: Topology, runtime: Runtime, store: Any, settings: RunSettings, evidence: Evidence, activity: Activity
) -> tuple[list[Report], Group]:
    """Holds the roll call and joins the group. Returns the reports and the group."""
    mine = report(topology, runtime, evidence)
    # Longer than both waits, so that the roll call reports who is missing, and not the stall detection.
    limit = 2 * (settings.timeouts.rendezvous + VERDICT_SECONDS)
    with activity.within("the roll call", waits=True, limit=limit):
        reports = call(store, mine, evidence, settings.timeouts.rendezvous, settings.launch.share_devices)
        group = join(topology, runtime, store, settings.timeouts.collective, activity)
        prove(group, runtime, settings.timeouts.rendezvous)
    return reports, group


def report(topology: Topology, runtime: Runtime, evidence: Evidence) -> Report:
    place = topology.place
    return Report(
        rank=place.rank, local_rank=place.local_rank, host=place.host, pid=os.getpid(),
        device=str(runtime.device), physical_device=runtime.identity(),
        world_size=topology.world_size, runtime_world=runtime.world_size(),
        python=platform.python_version(), torch=torch.__version__, lockstep=version.installed(),
        config=digest(evidence.config), source=digest(evidence.source),
    )  # fmt: skip


def prove(group: Group, runtime: Runtime, limit: float) -> None:
    """Checks with an all_reduce that the data plane counts every rank exactly once."""
    if group.world_size == 1:
        return
    seen = torch.zeros(group.world_size, dtype=torch.float32)
    seen[group.rank] = 1.0
    seen = seen.to(runtime.device)
    try:
        work = runtime.all_reduce(seen)
        if work is not None:
            work.wait(timedelta(seconds=limit))
        found = [int(each) for each in seen.cpu().tolist()]
    except RuntimeError as error:
        raise RollCallError(
            f"all {group.world_size} ranks reached the store, but rank {group.rank} could not add up a number with "
            f"the others within {limit:g} s: the {runtime.backend} data plane does not connect them. Check the "
            "firewall between the hosts and which network interface is used (GLOO_SOCKET_IFNAME, "
            f"NCCL_SOCKET_IFNAME): {str(error).strip().splitlines()[0]}"
        ) from None
    wrong = contributions_fault(group.gather(found, "the proof of the data plane"), runtime.backend)
    if wrong:
        raise RollCallError(wrong)


def contributions_fault(found: list[list[int]], backend: str) -> str | None:
    """Describes what is wrong if rank r received found[r][s] contributions of rank s."""
    lines = []
    for rank, counts in enumerate(found):
        absent = [each for each, count in enumerate(counts) if count == 0]
        repeated = [each for each, count in enumerate(counts) if count not in (0, 1)]
        if absent:
            lines.append(f"rank {rank} received nothing from {ranks_text(absent)}")
        if repeated:
            lines.append(f"rank {rank} received {ranks_text(repeated)} more than once")
    if not lines:
        return None
    return (
        f"the {backend} data plane does not reduce over the {len(found)} ranks of this run: {'; '.join(lines)}. "
        "Every rank would train a model of its own. Check that all processes were started by one launcher and that "
        "the runtime spans them"
    )
