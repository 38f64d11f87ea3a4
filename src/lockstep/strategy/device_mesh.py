"""Torch's mesh of processes, made of groups whose waits have the run's own limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime


def make_mesh(runtime: Runtime, group: Group, sizes: Mapping[str, int], first: Sequence[str]) -> DeviceMesh:
    """A mesh over all ranks, which have their places in rank order, the last axis running fastest.

    Torch's parts want the axes that they split batches over before all others, whatever their order in the config.
    """
    group.join_alone(runtime.backend)
    axes = [axis for axis in first if axis in sizes] + [axis for axis in sizes if axis not in first]
    ranks = torch.arange(group.world_size).view(*sizes.values()).permute([list(sizes).index(axis) for axis in axes])
    with group.activity.within("making the mesh", waits=group.world_size > 1), group.closed_to_others():
        groups = [_along(ranks, dimension, group, runtime.mesh_backend) for dimension in range(ranks.dim())]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        runtime.device.type,
        mesh=ranks,
        mesh_dim_names=tuple(axes),
    )


def _along(ranks: torch.Tensor, dimension: int, group: Group, backend: str) -> dist.ProcessGroup:
    """The group of this rank along one axis, after making those of all ranks in the same order."""
    mine: dist.ProcessGroup | None = None
    lines = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    for line in lines:
        made = dist.new_group(line, backend=backend, timeout=timedelta(seconds=group.timeout))
        if group.rank in line:
            mine = made
    assert mine is not None
    return mine
