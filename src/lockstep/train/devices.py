"""The devices of a run: how many there are, whose they are, and the mesh that they form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy


class Devices:
    """The devices of one rank, and of all the others."""

    def __init__(self, group: Group, runtime: Runtime, strategy: Strategy) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy

    @property
    def addressable(self) -> int:
        """Devices that this process drives."""
        return self._runtime.addressable_device_count()

    @property
    def everywhere(self) -> int:
        """Devices of all processes together. Where each is a world of its own, they are added up."""
        known, world_size = self._runtime.global_device_count(), self._group.world_size
        apart = known is None or (self._runtime.world_size() is None and world_size > 1)
        return self.addressable * world_size if apart else int(known or 1)

    @property
    def meshes(self) -> Mapping[str, Any]:
        return self._strategy.meshes

    def broadcast_parameters(self, model: nn.Module) -> None:
        if self._group.world_size == 1:
            return
        with self._group.activity.within("broadcasting the parameters", waits=True), torch.no_grad():
            self._runtime.broadcast([*model.parameters(), *model.buffers()])
