"""Devices and processes in the terms of torch_xla and JAX: `run.devices`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy


class Devices:
    """The devices of this process and of all others, and the meshes over them."""

    def __init__(self, group: Group, runtime: Runtime, strategy: Strategy) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy

    @property
    def process_index(self) -> int:
        """The rank."""
        return self._group.rank

    @property
    def process_count(self) -> int:
        """The number of ranks."""
        return self._group.world_size

    @property
    def addressable_device_count(self) -> int:
        """The number of devices that this process drives."""
        return self._runtime.addressable_device_count()

    @property
    def global_device_count(self) -> int:
        """The number of devices of all processes together."""
        known, world_size = self._runtime.global_device_count(), self._group.world_size
        apart = known is None or (self._runtime.world_size() is None and world_size > 1)
        return self.addressable_device_count * world_size if apart else int(known or 1)

    @property
    def strategy(self) -> str:
        """The name of the strategy: how models and batches are spread over devices."""
        return self._strategy.name

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The device meshes by name."""
        return self._strategy.meshes

    @property
    def mesh(self) -> Any:
        """The mesh that batches are spread over: of torch_xla under SPMD, else of torch, where the config has one."""
        return self._strategy.meshes.get("mesh")

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchanges bytes among all ranks through their hosts; a subset of them is refused."""
        return self._group.rendezvous(tag, payload, ranks)

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Gives every rank rank 0's parameters and buffers, so that replicas start equal."""
        if self._group.world_size == 1:
            return
        with self._group.activity.within("broadcasting the parameters", waits=True):
            self._runtime.broadcast([*model.parameters(), *model.buffers()])
