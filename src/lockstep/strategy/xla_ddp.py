"""One replica per process on XLA devices: gradients are averaged in the graph, or through the hosts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.runtime.base import in_buckets
from lockstep.runtime.xla import XlaRuntime
from lockstep.strategy.base import Strategy
from lockstep.strategy.collectives import cannot_gather
from lockstep.strategy.parameters import Parameters, gradients_of

logger = logging.getLogger(__name__)


class XlaDdpStrategy(Strategy):
    """Torch's DDP hooks into every gradient as it is computed, and XLA computes none before the step ends.

    Where the runtime spans the processes (TPU), the average is part of the program. Where each process is a world of
    its own (PJRT CPU), gradients travel through the hosts' group in a few large buckets.
    """

    name = "ddp"
    reduces_in_step: ClassVar[bool] = True

    def __init__(self, runtime: XlaRuntime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self.has_replicas, self._replicas_averaged = True, world_size
        self._xla, self._shape = runtime, settings.mesh
        self._bucket_bytes = settings.bucket_mb * 2**20

    @functools.cached_property
    def meshes(self) -> Mapping[str, Any]:
        """The processes as torch's own mesh, where one was asked for: no mesh of XLA's spans worlds of one."""
        if self._shape is None:
            return {}
        return {"mesh": init_device_mesh("cpu", tuple(self._shape.values()), mesh_dim_names=tuple(self._shape))}

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        self.runtime.broadcast([*model.parameters(), *model.buffers()])
        if self._xla.spans_processes:
            logger.info("gradients are reduced in the graph, over %d processes", self.world_size)
        else:
            logger.info(
                "gradients are reduced through the hosts' group: on PJRT %s every process is a world of its own",
                self._xla.family,
            )
        return model

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        total = super().total_count(counts)
        self.runtime.all_reduce(total)
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise cannot_gather(self.name)

    def reduce_gradients(self, parameters: Parameters, counts: int = 0) -> int:
        gradients = gradients_of(parameters)
        if self._xla.spans_processes:
            import torch_xla.core.xla_model as xm

            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1.0 / self.world_size)
            return counts
        buckets = in_buckets(gradients, lambda each: each.nbytes, self._bucket_bytes, lambda each: each.dtype)
        # Joined on the device, so that one program computes all of it and a few long copies bring it here.
        joined = [torch.cat([each.reshape(-1) for each in bucket]) for bucket in buckets]
        on_host = self.runtime.to_host(joined)
        works: list[Any] = [dist.all_reduce(each, async_op=True) for each in on_host]
        for bucket, summed, work in zip(buckets, on_host, works, strict=True):
            work.wait()
            back = (summed / self.world_size).to(self.runtime.device)
            for gradient, part in zip(bucket, torch.split(back, [each.numel() for each in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return counts
