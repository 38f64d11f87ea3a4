"""One replica per process; gradients are averaged by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
import logging
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import Strategy as StrategySettings
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy

logger = logging.getLogger(__name__)

# Buffers are made equal where it matters, before they are evaluated or saved. Broadcasting them in every forward pass
# would make a rank that evaluates through the wrapper alone wait for the others for ever. Torch 2.13 renamed it.
_BROADCAST_OPTION = "forward_sync_buffers"
if _BROADCAST_OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _BROADCAST_OPTION = "broadcast_buffers"
_NO_BROADCAST: dict[str, Any] = {_BROADCAST_OPTION: False}


class Replica(DistributedDataParallel):
    """Torch's wrapper, which without gradients is the module that it wraps: a rank may then evaluate alone."""

    _warned = False

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward(*inputs, **keywords)  # type: ignore[no-untyped-call]
        if not self._warned:
            self._warned = True
            logger.warning(
                "the model was called through its DDP wrapper without gradients; it was passed by, so that no rank "
                "waits. Evaluate with run.module (in a Task, with the model that metrics() is given)"
            )
        return self.module(*inputs, **keywords)


class DdpStrategy(Strategy):
    name: ClassVar[str] = "ddp"

    def __init__(self, runtime: Runtime, settings: StrategySettings) -> None:
        super().__init__(runtime)
        self._settings = settings
        self._wrapped: DistributedDataParallel | None = None

    def place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.runtime.device)  # first, since DDP looks at where the parameters are
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("task: the model has no parameter that requires a gradient, so there is nothing to train")
        on_gpu = self.runtime.device.type == "cuda"
        self._wrapped = Replica(
            model,
            device_ids=[self.runtime.device.index] if on_gpu else None,
            output_device=self._settings.output_device if on_gpu else None,
            find_unused_parameters=self._settings.find_unused_parameters,
            bucket_cap_mb=self._settings.bucket_mb,
            **_NO_BROADCAST,
        )
        if not self._settings.find_unused_parameters:
            _fix_bucket_layout(self._wrapped)
        return self._wrapped

    def replicas(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters())

    def sync_gradients(self, wanted: bool) -> None:
        if self._wrapped is not None:
            # What DDP's own no_sync() sets; a context manager cannot span the caller's forward and backward.
            self._wrapped.require_backward_grad_sync = wanted

    def equalize_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def _fix_bucket_layout(wrapped: DistributedDataParallel) -> None:
    """Make DDP choose its final gradient buckets now, before the first step.

    DDP starts with one bucket and regroups after its first backward pass. With three ranks or more the order in
    which an element is summed depends on its place in a bucket, so the first step after a resume would round
    differently from the same step of a run that was never interrupted. After a backward pass over zeros, it can
    regroup here in both cases. Left to the first forward pass, ranks would wait for each other in the midst of it.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    wrapped.reducer.prepare_for_backward([])
    with torch.enable_grad():
        # Gradients become ready in the reverse of this order, as they do in a network that is used front to back.
        torch.stack([(parameter * 0).sum().float() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]
    wrapped.reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None
