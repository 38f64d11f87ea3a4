"""A body of sharded_bodies on ranks whose mesh exchanges all through the host, as those do that share a GPU."""

from __future__ import annotations

import multiprocessing
from typing import Any

import sharded_bodies

import lockstep
from lockstep.runtime import cuda
from lockstep.runtime.cpu import CpuRuntime


def trained(run: lockstep.Run) -> dict[str, Any]:
    assert run.devices.mesh.get_group("data").name() == cuda.THROUGH_HOST
    return sharded_bodies.trained(run)


if multiprocessing.parent_process() is not None:  # in a rank, before its device is made
    CpuRuntime.mesh_backend = property(lambda self: cuda.register_through_host())  # type: ignore[assignment, method-assign]
