"""A Triton kernel that turns rows of logits into their losses and, in the same memory, into their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 16384, 16


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits, labels, losses, classes, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * classes
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    largest, total = -float("inf"), 0.0
    for start in range(0, classes, BLOCK):
        inside = start + columns < classes
        values = tl.load(logits + start + columns, inside, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(values))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(values - largest))
    kept = label != ignore_index
    chosen = tl.load(logits + label, kept, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(kept, tl.log(total) - (chosen - largest), 0.0))
    for start in range(0, classes, BLOCK):
        inside = start + columns < classes
        values = tl.load(logits + start + columns, inside, other=-float("inf")).to(tl.float32)
        slope = tl.exp(values - largest) / total - tl.where(start + columns == label, 1.0, 0.0)
        tl.store(logits + start + columns, tl.where(kept, slope, 0.0).to(logits.dtype.element_ty), inside)


def losses_and_slopes(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Returns each row's loss, and overwrites its logits with its gradient: both are zero for ignored rows."""
    is_class = (labels >= 0) & (labels < logits.shape[1])
    torch._assert_async((is_class | (labels == ignore_index)).all(), "linear_cross_entropy: a target is not a class")
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    if len(labels):
        _kernel[(len(labels),)](logits, labels, losses, logits.shape[1], ignore_index, _BLOCK, num_warps=_WARPS)
    return losses
