"""Collectives with gradients: BatchNorm over the batches of all ranks, and all_gather.

Torch's SyncBatchNorm is for GPUs alone. On other devices, where GPUs are shared over gloo, and in layers with a custom
forward (BatchNorm and an activation), the same is computed here by ordinary operations. A layer keeps its forward: only
the normalisation inside of it is exchanged.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from lockstep.errors import ConfigError
from lockstep.runtime.base import meeting_place

logger = logging.getLogger(__name__)


def synchronise(model: nn.Module, copies: int = 1) -> None:
    """Makes every BatchNorm layer compute over all ranks, of which `copies` have the same slice of a batch. Layers stay
    the same objects, with the same parameters, buffers and hooks."""
    layers = {
        name: each for name, each in model.named_modules()
        if isinstance(each, _BatchNorm) and not isinstance(each, (nn.SyncBatchNorm, LazyModuleMixin))
        and not isinstance(vars(each).get("forward"), SyncedForward)
    }  # fmt: skip
    by_torch = dist.get_backend() == "nccl" and copies == 1
    for name, layer in layers.items():
        if by_torch and type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer):
            layer.__class__ = nn.SyncBatchNorm
            vars(layer).update(process_group=None)
        else:
            vars(layer)["forward"] = SyncedForward(layer.forward, layer, name, copies)
    if layers:
        logger.info("sync_batchnorm: %d layers normalise by the batches of all ranks", len(layers))


class SyncedForward:
    """The forward of a layer, in which batch_norm is computed over all ranks."""

    def __init__(self, forward: Callable[..., Any], layer: nn.Module, name: str, copies: int) -> None:
        self._forward, self._layer, self._name, self._copies = forward, layer, name, copies

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self._layer.training:
            return self._forward(*inputs, **named)
        with _Normalisation(self._copies) as found:
            output = self._forward(*inputs, **named)
        if not found.used:
            raise ConfigError(
                f"strategy.sync_batchnorm: the forward of {self._name} ({type(self._layer).__name__}) does not call "
                "torch's batch_norm, so its statistics cannot be computed over all ranks. Call super().forward() or "
                "torch.nn.functional.batch_norm in it, or set sync_batchnorm: false"
            )
        return output


class _Normalisation(TorchFunctionMode):
    """Within, torch.nn.functional.batch_norm normalises by the batches of all ranks."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self._copies, self.used = copies, False

    def __torch_function__(self, function: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*inputs, **(named or {}))
        self.used = True
        return self._batch_norm(*inputs, **(named or {}))

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return _over_ranks(input, running_mean, running_var, weight, bias, momentum, eps, self._copies)


def _over_ranks(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    momentum: float, eps: float, copies: int,
) -> Tensor:  # fmt: skip
    over = [dimension for dimension in range(input.dim()) if dimension != 1]
    # In double precision, where a difference of two large sums is still exact enough.
    mine = input.double()
    here = torch.full((1, input.shape[1]), mine.numel() / input.shape[1], dtype=mine.dtype, device=input.device)
    sums = torch.stack([mine.sum(over), mine.square().sum(over)])
    total, squares, count = _SumOverRanks.apply(torch.cat([sums, here]))  # type: ignore[no-untyped-call]
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0)
    if running_mean is not None and running_var is not None:
        examples = count.detach() / copies
        unbiased = variance.detach() * examples / (examples - 1).clamp(min=1)
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    shape = [1, -1, *[1] * (input.dim() - 2)]
    wide = torch.promote_types(input.dtype, torch.float32)
    found = ((mine - mean.view(shape)) * (variance + eps).rsqrt().view(shape)).to(wide)
    if weight is not None:
        found = found * weight.view(shape)
    if bias is not None:
        found = found + bias.view(shape)
    return cast(Tensor, found.to(input.dtype))


class _SumOverRanks(torch.autograd.Function):
    """A rank's input changes the output of all ranks: its gradient is the sum of all of theirs."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _SumOverRanks.apply(*gradients)  # type: ignore[no-untyped-call]


def all_gather(mine: Tensor, dp_rank: int, is_leader: bool, copies: int) -> Tensor:
    """Concatenates one tensor of each dp rank along the first dimension, in their order.

    Lengths may differ. `copies` ranks compute the same slice of the batch, and one of them is its leader.
    """
    if mine.dim() == 0:
        mine = mine.unsqueeze(0)
    found: Tensor = _Gathered.apply(mine, dp_rank, is_leader, copies)  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    """A rank's input changes the losses of all ranks: its gradient is the sum of theirs.

    Gradients of parameters are then averaged over ranks, as the losses are: the result is the gradient of the mean
    loss, as on one process.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, dp_rank: int, is_leader: bool, copies: int) -> Tensor:
        device, look = meeting_place(mine.device), (list(mine.shape[1:]), mine.dtype)
        kind = zlib.crc32(repr(look).encode())
        about = _exchanged(torch.tensor([dp_rank, len(mine), int(is_leader), kind], device=device)).tolist()
        if len({kind for *_, kind in about}) > 1:
            raise ConfigError(
                f"run.all_gather: ranks have tensors that differ in more than their length. Behind the first "
                f"dimension, rank {dist.get_rank()} has {look[0]} of {look[1]}: give it the same on all ranks"
            )
        longest = max(length for _, length, *_ in about)
        padded = torch.zeros((longest, *mine.shape[1:]), dtype=mine.dtype, device=device)
        padded[: len(mine)] = mine
        parts = _exchanged(padded.view(-1).view(torch.uint8)).view(mine.dtype).view(len(about), *padded.shape)
        leaders = sorted((dp_rank, length, rank) for rank, (dp_rank, length, leads, _) in enumerate(about) if leads)
        begin = sum(length for theirs, length, _ in leaders if theirs < dp_rank)
        ctx.mine, ctx.copies = slice(begin, begin + len(mine)), copies
        return torch.cat([parts[rank, :length] for _, length, rank in leaders]).to(mine.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        wide = gradient.to(meeting_place(gradient.device), torch.promote_types(gradient.dtype, torch.float32))
        total = _SumOverRanks.apply(wide)  # type: ignore[no-untyped-call]
        return (total[ctx.mine] / ctx.copies).to(gradient.device, gradient.dtype), None, None, None


def _exchanged(mine: Tensor) -> Tensor:
    """Returns the tensors of all ranks, of the same shape, in rank order."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


def cannot_gather(strategy: str) -> ConfigError:
    """Returns the error of run.all_gather on XLA, where a tensor cannot be exchanged in the middle of a step."""
    return ConfigError(
        f"run.all_gather: strategy: {strategy} on runtime: xla cannot exchange tensors in the middle of a step. "
        "Use strategy: spmd or fsdp, where a batch is that of all devices already"
    )
