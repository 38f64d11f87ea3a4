"""The whole roll call of one rank: it reports, the group is formed, and the data plane is proven."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from typing import Any

import torch

from lockstep import version
from lockstep.config.schema import Launch
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.rendezvous import join
from lockstep.distributed.rollcall.call import VERDICT_SECONDS, call
from lockstep.distributed.rollcall.report import Evidence, Report, digest
from lockstep.distributed.topology import Topology, ranks_text
from lockstep.errors import RollCallError
from lockstep.runtime.base import Runtime


def hold(
    topology: Topology,
    runtime: Runtime,
    store: Any,
    limits: Launch,
    evidence: Evidence,
    activity: Activity,
) -> tuple[list[Report], Group]:
    """Everybody's reports (on rank 0; on the others, their own) and the group, of which all members are known."""
    mine = report(topology, runtime, evidence)
    # Longer than both of its own waits, so that it is the roll call that says who is missing, and not the watch.
    limit = 2 * (limits.join_timeout + VERDICT_SECONDS)
    with activity.within("the roll call", waits=True, limit=limit):
        reports = call(store, mine, evidence, limits.join_timeout, limits.share_devices)
        group = join(topology, runtime, store, limits.timeout, activity)
        prove(group, runtime, limits.join_timeout)
    return reports, group


def report(topology: Topology, runtime: Runtime, evidence: Evidence) -> Report:
    place = topology.place
    return Report(
        rank=place.rank,
        local_rank=place.local_rank,
        host=place.host,
        pid=os.getpid(),
        device=str(runtime.device),
        physical_device=runtime.identity(),
        world_size=topology.world_size,
        runtime_world=runtime.world_size(),
        python=platform.python_version(),
        torch=torch.__version__,
        lockstep=version.installed(),
        config=digest(evidence.config),
        source=digest(evidence.source),
    )


def prove(group: Group, runtime: Runtime, limit: float) -> None:
    """Shows by an all_reduce that the data plane adds up what every rank contributes, each exactly once."""
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
    """What is wrong where rank r saw rank s contribute found[r][s] times."""
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
