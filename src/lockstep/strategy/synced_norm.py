"""BatchNorm over the batches of all processes: its mean and variance are those of the whole global batch.

Torch's SyncBatchNorm is for GPUs alone. On other devices, and where GPUs are shared and gloo is between them, the same
is computed here by ordinary operations.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

logger = logging.getLogger(__name__)


class SyncedBatchNorm(_BatchNorm):
    """In training, by ordinary operations over all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return self._by_hand(input) if self.training else super().forward(input)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least two dimensions, got {list(input.shape)}")

    def _by_hand(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        over = [dimension for dimension in range(input.dim()) if dimension != 1]
        # In double precision, where a difference of two large sums is still exact enough.
        mine = input.double()
        here = torch.full((1, input.shape[1]), mine.numel() / input.shape[1], dtype=mine.dtype, device=input.device)
        sums = torch.stack([mine.sum(over), mine.square().sum(over)])
        total, squares, count = _SumOverRanks.apply(torch.cat([sums, here]))  # type: ignore[no-untyped-call]
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        if self.track_running_stats:
            self._remember(mean.detach(), (variance * count / (count - 1).clamp(min=1)).detach())
        shape = [1, -1, *[1] * (input.dim() - 2)]
        found = ((mine - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)).to(input.dtype)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return cast(Tensor, found)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def synchronise(model: nn.Module) -> None:
    """Make every BatchNorm layer one that is computed over all ranks. Layers stay the same objects, with the same
    parameters, buffers and hooks."""
    layers = [
        each for each in model.modules()
        if isinstance(each, _BatchNorm) and not isinstance(each, (nn.SyncBatchNorm, SyncedBatchNorm, LazyModuleMixin))
    ]  # fmt: skip
    by_torch = dist.get_backend() == "nccl"
    for layer in layers:
        layer.__class__ = nn.SyncBatchNorm if by_torch else SyncedBatchNorm
        vars(layer)["process_group"] = None
    logger.info("sync_batchnorm: %d layers normalise by the batches of all ranks", len(layers))


class _SumOverRanks(torch.autograd.Function):
    """What a rank puts in changes what all of them get out: so its gradient is the sum of all of theirs."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total
