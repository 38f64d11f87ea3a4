"""Tensors of all ranks, concatenated, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(mine: Tensor, dp_rank: int, is_leader: bool, copies: int) -> Tensor:
    """Concatenates one tensor of each share of the batch along the first dimension, in the order of the shares.

    Ranks may have different lengths. `copies` ranks compute the same share, and one of them is its leader.
    """
    if mine.dim() == 0:
        mine = mine.unsqueeze(0)
    found: Tensor = _Gathered.apply(mine, dp_rank, is_leader, copies)  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    """What a rank puts in changes the losses of all ranks: its gradient is the sum of theirs.

    Gradients of parameters are then averaged over ranks, as the losses are: the result is the gradient of the mean
    loss, as on one process.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, dp_rank: int, is_leader: bool, copies: int) -> Tensor:
        device = _meeting_place(mine)
        about = _exchanged(torch.tensor([dp_rank, len(mine), int(is_leader)], device=device)).tolist()
        longest = max(length for _, length, _ in about)
        padded = torch.zeros((longest, *mine.shape[1:]), dtype=mine.dtype, device=device)
        padded[: len(mine)] = mine
        parts = _exchanged(padded.view(-1).view(torch.uint8)).view(mine.dtype).view(len(about), *padded.shape)
        leaders = sorted((dp_rank, length, rank) for rank, (dp_rank, length, leads) in enumerate(about) if leads)
        begin = sum(length for theirs, length, _ in leaders if theirs < dp_rank)
        ctx.mine, ctx.copies = slice(begin, begin + len(mine)), copies
        return torch.cat([parts[rank, :length] for _, length, rank in leaders]).to(mine.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        total = gradient.to(_meeting_place(gradient), torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(total)
        return (total[ctx.mine] / ctx.copies).to(gradient.device, gradient.dtype), None, None, None


def _exchanged(mine: Tensor) -> Tensor:
    """What every rank has in a tensor of the same shape, in rank order."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


def _meeting_place(tensor: Tensor) -> torch.device:
    """Where ranks exchange it: gloo, which ranks that share a GPU use, does so in host memory alone."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else tensor.device
