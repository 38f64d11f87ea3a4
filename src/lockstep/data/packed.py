"""Batches that travel from a worker in one piece of shared memory.

Every tensor that a worker sends costs a file of shared memory, a descriptor that is passed on, and a mapping on either
side. Where examples are tuples, lists or mappings of tensors and numbers, which is what most datasets give, all columns
of a batch are put together in one such file, and taken apart as views of it. A small column (labels) is copied out: a
view that is kept keeps the whole file. The batch is the one that torch's default_collate makes; examples of any other
kind are left to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

_ALIGNED_TO = 64
_LEAST_PART = 1 / 4  # of the file that a view must be: so a kept one holds at most four times its own size
_NUMBERS = {int: torch.int64, float: torch.float64}  # as default_collate has them


class Column(NamedTuple):
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Packed(NamedTuple):
    memory: Tensor  # bytes
    columns: tuple[Column, ...]
    keys: tuple[Any, ...] | None  # of mappings; None: a list

    def unpacked(self) -> Any:
        # In page-locked memory, a batch is on its way to a device: a copy would not be page-locked.
        shared = self.memory.is_shared()  # type: ignore[no-untyped-call]
        least = _LEAST_PART * len(self.memory) if shared else 0
        found = [each.of(self.memory).clone() if each.size < least else each.of(self.memory) for each in self.columns]
        return found if self.keys is None else dict(zip(self.keys, found, strict=True))


def collate(examples: Sequence[Any]) -> Any:
    """In a worker: what default_collate makes of these examples, packed where that is possible."""
    first = examples[0]
    keys = tuple(first) if type(first) is dict else None
    if keys is None and type(first) not in (tuple, list):
        return default_collate(list(examples))
    width = len(first)
    if width < 2 or any(type(each) is not type(first) or len(each) != width for each in examples):
        return default_collate(list(examples))
    rows = [[each[key] for key in keys] for each in examples] if keys is not None else examples
    values = list(zip(*rows, strict=True))
    columns, size = [], 0
    for column in values:
        shape_and_type = _shape_and_type(column)
        if shape_and_type is None:
            return default_collate(list(examples))
        shape, dtype = shape_and_type
        columns.append(Column(size, dtype, (len(examples), *shape)))
        size += -(-math.prod(columns[-1].shape) * dtype.itemsize // _ALIGNED_TO) * _ALIGNED_TO
    if not size:
        return default_collate(list(examples))
    storage: Any = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    for spec, column in zip(columns, values, strict=True):
        if isinstance(column[0], Tensor):
            torch.stack(column, out=spec.of(memory))
        else:
            spec.of(memory).copy_(torch.tensor(column, dtype=spec.dtype))
    return Packed(memory, tuple(columns), keys)


def _shape_and_type(column: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Of what all examples have in a place; None where that is not the same, or something else."""
    first = column[0]
    if type(first) in _NUMBERS:
        return ((), _NUMBERS[type(first)]) if all(type(each) is type(first) for each in column) else None
    if type(first) is not Tensor or first.layout is not torch.strided or first.device.type != "cpu":
        return None
    shape, dtype = first.shape, first.dtype
    alike = all(
        type(each) is Tensor and each.shape == shape and each.dtype is dtype and not each.requires_grad
        for each in column
    )
    return (tuple(shape), dtype) if alike else None
