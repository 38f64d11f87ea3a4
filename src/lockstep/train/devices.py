"""A run in terms of its devices: how many there are, whose they are, and the mesh that they form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy
from lockstep.train.deciding import Deciding


class OnDevices(Deciding):
    """One rank, its devices, and those of all the others."""

    def __init__(self, group: Group, runtime: Runtime, strategy: Strategy) -> None:
        super().__init__(group)
        self.runtime, self._strategy = runtime, strategy

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def strategy(self) -> str:
        return self._strategy.name

    @property
    def process_index(self) -> int:
        return self.rank

    @property
    def process_count(self) -> int:
        return self.world_size

    @property
    def addressable_device_count(self) -> int:
        """Devices that this process drives."""
        return self.runtime.addressable_device_count()

    @property
    def global_device_count(self) -> int:
        """Devices of all processes together. Where each is a world of its own, they are added up."""
        known = self.runtime.global_device_count()
        apart = known is None or (self.runtime.world_size() is None and self.world_size > 1)
        return self.addressable_device_count * self.world_size if apart else int(known or 1)

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The device meshes of SPMD by name; `mesh` is the one that batches are spread over."""
        return self._strategy.meshes

    @property
    def mesh(self) -> Any:
        """The mesh that batches are spread over: of torch_xla under SPMD, else of torch, where one was asked for."""
        return self._strategy.meshes.get("mesh")

    def broadcast_parameters(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers: replicas then start equal, whatever each of them drew."""
        if self.world_size == 1:
            return
        with self.group.activity.within("broadcasting the parameters", waits=True), torch.no_grad():
            self.runtime.broadcast([*model.parameters(), *model.buffers()])
