"""What a rank has of a tensor that is spread over ranks, and what was saved of one.

Torch's part for spread tensors takes a while to import, and runs without any need none of it: whoever makes one has
imported it.
"""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that this rank has."""

    tensor: Tensor  # what this rank has, in its own memory
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where this part begins in it
    holders: tuple[int, ...]  # all ranks that have this very part, ascending


def is_spread(value: Any) -> TypeGuard[DTensor]:
    """Whether something is a tensor that is spread over ranks."""
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(value, imported.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in its own memory; without the graph that to_local() would make for it."""
    return tensor._local_tensor if is_spread(tensor) else tensor


def slice_of(tensor: Tensor) -> Slice | None:
    """This rank's part of a DTensor; None for any other tensor, which is whole on every rank that has it."""
    if not is_spread(tensor):
        return None
    shape, placements = tuple(tensor.shape), tuple(tensor.placements)
    size, offset, holders = _place(shape, tensor.device_mesh, placements)
    with torch.no_grad():
        local = tensor.to_local().detach()
    if tuple(local.shape) != size:
        raise ValueError(
            f"a DTensor of shape {shape} with placements {placements} has a local part of shape {tuple(local.shape)}, "
            f"where its placements make it {size}: it was made from parts of other sizes (DTensor.from_local)"
        )
    return Slice(local, shape, offset, holders)


class Stored(abc.ABC):
    """A tensor in a checkpoint, read when it is asked for and only as far as it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abc.abstractmethod
    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """The block of this size that begins there, in host memory of its own."""

    def fill(self, tensor: Tensor, offset: tuple[int, ...]) -> None:
        """Give a tensor the values of the block of its size that begins there."""
        with torch.no_grad():
            tensor.copy_(self.part(offset, tuple(tensor.shape)))

    def whole(self) -> Tensor:
        return self.part((0,) * len(self.shape), self.shape)


@functools.lru_cache(maxsize=4096)
def _place(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Size, offset and holders of this rank's part; the same for a parameter and all of its optimizer's state."""
    from torch.distributed.tensor import Partial

    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"a DTensor of shape {shape} is on a mesh that this rank is not part of: {mesh}")
    if any(isinstance(each, Partial) for each in placements):
        raise ValueError(f"a DTensor of shape {shape} is not reduced yet ({placements}): it has no value to be saved")
    sizes, offset = list(shape), [0] * len(shape)
    # A strided part is one of a part: fully_shard divides what tensor parallelism has left to a rank. Torch has a
    # function for this, which up to 2.9 is wrong where such a part does not divide evenly.
    order = sorted(range(len(placements)), key=lambda axis: hasattr(placements[axis], "split_factor"))
    for axis in order:
        dimension = getattr(placements[axis], "dim", None)
        if dimension is not None:
            length = -(-sizes[dimension] // mesh.size(axis))  # as torch.chunk has it: the last ones may get less
            begin = min(coordinate[axis] * length, sizes[dimension])
            offset[dimension] += begin
            sizes[dimension] = min(length, sizes[dimension] - begin)
    return tuple(sizes), tuple(offset), _holders(mesh, placements, coordinate)


def _holders(mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: Sequence[int]) -> tuple[int, ...]:
    """A mesh that is part of a larger one leaves axes of that out: what is not split over them is alike along them."""
    from torch.distributed.tensor import Replicate

    names: tuple[str | int, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    root = _root_of(mesh) if mesh.mesh_dim_names else mesh
    split = {
        name: position
        for name, placement, position in zip(names, placements, coordinate, strict=True)
        if not isinstance(placement, Replicate)
    }
    ranks = root.mesh[tuple(split.get(name, slice(None)) for name in root.mesh_dim_names or names)]
    return tuple(sorted(ranks.flatten().tolist()))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.9

    found: DeviceMesh = _mesh_resources.get_root_mesh(mesh)
    return found
