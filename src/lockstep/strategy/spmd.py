"""One XLA program over a mesh of devices: tensors are marked with how they are split, and XLA does the rest."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.strategy import ShardRule, dp_size
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.errors import ConfigError
from lockstep.runtime.moving import map_tensors
from lockstep.runtime.xla import XlaRuntime
from lockstep.strategy import mesh as meshing
from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Modules, to_device
from lockstep.strategy.placing import Parallelize

logger = logging.getLogger(__name__)


class SpmdStrategy(Strategy):
    places_rank_0: ClassVar[bool] = False  # all processes make the same model, and mark the same parts of it
    gathers_state: ClassVar[bool] = True

    def __init__(self, runtime: XlaRuntime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self.name = settings.type
        import torch_xla.distributed.spmd as xs

        self._xs, self._settings = xs, settings
        devices = runtime.global_device_count()
        self._shapes = meshing.resolve_meshes(settings, devices)
        self._meshes = {
            name: xs.Mesh(np.arange(devices), tuple(shape.values()), tuple(shape))
            for name, shape in self._shapes.items()
        }
        self._data_size = dp_size(self._shapes[meshing.MAIN])
        self.batch_multiple = self._data_size // math.gcd(self._data_size, world_size)
        self.measures_together = world_size > 1
        xs.set_global_mesh(self._meshes[meshing.MAIN])
        self._rules = dict(settings.shard)
        self._shardings: dict[int, meshing.Sharding] = {}  # by the identity of the parameter
        if world_size > 1 and self._data_size != devices:
            raise ConfigError(
                f"strategy.mesh: {self._shapes[meshing.MAIN]} on {world_size} hosts: every host loads its own part of "
                "the batch, which XLA can only put together where the data axis has all devices"
            )

    @property
    def meshes(self) -> Mapping[str, Any]:
        return {name.rpartition(".")[2]: each for name, each in self._meshes.items()}

    def split_by(self, rules: Mapping[str, ShardRule], parallelize: Parallelize | None) -> None:
        self._rules = meshing.with_rules_of_code(self._settings.shard, rules, self._shapes)

    def place(self, model: nn.Module) -> nn.Module:
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        found = meshing.shardings(shapes, self._shapes, self._settings, self._rules)
        model = to_device(model, self.runtime.device)  # first: what is not on the device cannot be split over it
        for name, parameter in model.named_parameters():
            if name in found:
                self._shardings[id(parameter)] = found[name]
                self._mark(parameter, found[name])
        self.runtime.end_of_program()
        text = " x ".join(f"{axis} {size}" for axis, size in self._shapes[meshing.MAIN].items())
        logger.info("mesh %s; %d of %d parameters are split", text, len(found), len(shapes))
        return model

    def move(self, batch: Any, number: int = 0) -> Any:
        return map_tensors(self._sent, batch)

    def _sent(self, tensor: Tensor) -> Tensor:
        import torch_xla.core.xla_model as xm

        if tensor.dim() == 0:
            return tensor.to(self.runtime.device)
        if len(tensor) * self.world_size % self._data_size:
            raise ConfigError(
                f"train.batch_size: {len(tensor) * self.world_size} examples cannot be spread evenly over the "
                f"{self._data_size} devices of the data axis"
            )
        spec = meshing.batch_spec(tensor.dim(), self._shapes[meshing.MAIN])
        mesh = self._meshes[meshing.MAIN]
        if self.world_size == 1:
            sent = tensor.to(self.runtime.device)
            self._xs.mark_sharding(sent, mesh, spec)
            return sent
        sharding = self._xs.ShardingSpec(mesh, spec, minibatch=True)
        sent = cast(Tensor, xm.send_cpu_data_to_device([tensor], self.runtime.device, input_sharding=sharding)[0])
        # Without `minibatch` XLA takes what the first host loaded for the whole batch, and says nothing.
        if len(sent) != len(tensor) * self.world_size:
            raise AssertionError(
                f"{self.world_size} hosts loaded {len(tensor)} examples each, but {len(sent)} are trained on"
            )
        return sent

    def restored(self, modules: Modules, optimizers: Sequence[Optimizer]) -> None:
        """Restored state is whole on every device; state of a split parameter is marked like it."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if (
                        id(parameter) in self._shardings
                        and isinstance(value, Tensor)
                        and value.shape == parameter.shape
                    ):
                        self._mark(value, self._shardings[id(parameter)])
        self.runtime.end_of_program()

    def _mark(self, tensor: Tensor, sharding: meshing.Sharding) -> None:
        with torch.no_grad():
            self._xs.mark_sharding(tensor, self._meshes[sharding.mesh], sharding.spec)
