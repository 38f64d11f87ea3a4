"""A Triton kernel that casts a matrix to eight bits and writes it twice: as it is, and transposed.

Hopper multiplies matrices of eight bits only where both are contiguous along the dimension that is summed over. Forward
and backward products sum over different dimensions, so each matrix is needed in both layouts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS, _TILE_COLUMNS, _WARPS = 128, 128, 8


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    source, scale, straight, transposed, rows, columns,
    WRITES_STRAIGHT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(source + place, inside, other=0.0).to(tl.float32) * tl.load(scale)
    short = values.to(transposed.dtype.element_ty)
    if WRITES_STRAIGHT:
        tl.store(straight + place, short, inside)
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(short), tl.trans(inside))


@torch.library.triton_op("lockstep::cast_both", mutates_args={})
def cast_both(source: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns `source * scale` in eight bits, and its transpose, each contiguous."""
    straight, transposed = torch.empty_like(source, dtype=dtype), _empty_transposed(source, dtype)
    _launch(source, scale, straight, transposed, True)
    return straight, transposed


@torch.library.triton_op("lockstep::cast_transposed", mutates_args={})
def cast_transposed(source: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the transpose of `source * scale` in eight bits, contiguous."""
    transposed = _empty_transposed(source, dtype)
    _launch(source, scale, transposed, transposed, False)
    return transposed


def _empty_transposed(source: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((source.shape[1], source.shape[0]), dtype=dtype, device=source.device)


def _launch(source: Tensor, scale: Tensor, straight: Tensor, transposed: Tensor, writes_straight: bool) -> None:
    rows, columns = source.shape
    grid = (-(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS))
    torch.library.wrap_triton(_kernel)[grid](
        source, scale, straight, transposed, rows, columns, writes_straight, _TILE_ROWS, _TILE_COLUMNS,
        num_warps=_WARPS,
    )  # fmt: skip
