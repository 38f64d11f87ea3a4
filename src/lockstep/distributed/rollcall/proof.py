"""The proof of the data plane: a collective whose right answer shows that every rank contributed exactly once."""

from __future__ import annotations

from datetime import timedelta

import torch

from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import RollCallError
from lockstep.runtime.base import Runtime


def prove(group: Group, runtime: Runtime, limit: float) -> None:
    """Show that the data plane adds up what every rank contributes, each exactly once."""
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
