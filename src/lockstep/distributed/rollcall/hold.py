"""The whole roll call of one rank: it reports, the group is formed, and the data plane is proven."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from lockstep import version
from lockstep.config.schema import Launch
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.rendezvous import join
from lockstep.distributed.rollcall.call import VERDICT_SECONDS, call
from lockstep.distributed.rollcall.proof import prove
from lockstep.distributed.rollcall.report import Evidence, Report, digest
from lockstep.distributed.topology import Topology
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
