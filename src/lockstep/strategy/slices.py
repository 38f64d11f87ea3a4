"""Slices of tensors that are spread over ranks (DTensors), and saved state that is read into them.

Importing DTensor takes a while, and many runs do not need it: whoever makes one has imported it.
"""

from __future__ import annotations

import abc
import functools
import itertools
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Slice:
    """The part of a tensor that this rank has."""

    tensor: Tensor  # what this rank has, in its own memory
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where this part begins in it
    holders: tuple[int, ...]  # all ranks that have this very part, ascending


def is_spread(value: Any) -> TypeGuard[DTensor]:
    """Whether something is a DTensor."""
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(value, imported.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank has of a tensor; without the graph that to_local() would make for it."""
    return tensor._local_tensor if is_spread(tensor) else tensor


def slice_of(tensor: Tensor) -> Slice | None:
    """Returns this rank's slice of a DTensor; None for any other tensor, which is whole on every rank."""
    if not is_spread(tensor):
        return None
    shape, placements = tuple(tensor.shape), tuple(tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"a DTensor of shape {shape} is on a mesh that this rank is not part of: {tensor.device_mesh}")
    offset, size = _place(shape, tensor.device_mesh, placements, tuple(coordinate))
    holders = _holders(tensor.device_mesh, placements, tuple(coordinate))
    with torch.no_grad():
        local = tensor.to_local().detach()
    if tuple(local.shape) != size:
        raise ValueError(
            f"a DTensor of shape {shape} with placements {placements} has a local part of shape {tuple(local.shape)}, "
            f"where its placements make it {size}: it was made from parts of other sizes (DTensor.from_local)"
        )
    return Slice(local, shape, offset, holders)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # where a part begins in its tensor, and its size


def boxes_of(tensor: Tensor, world_size: int) -> list[Box]:
    """Returns the part of a tensor that each rank has; all of it, where it is no DTensor."""
    shape = tuple(tensor.shape)
    if not is_spread(tensor):
        return [((0,) * len(shape), shape)] * world_size
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    root = _root_of(mesh) if mesh.mesh_dim_names else mesh
    if root.mesh.numel() != world_size or not set(mesh.mesh_dim_names or ()) <= set(root.mesh_dim_names or ()):
        raise ValueError(f"a DTensor of shape {shape} is on a mesh that is not one of all ranks: {mesh}")
    found: dict[int, Box] = {}
    for place, rank in zip(itertools.product(*map(range, root.mesh.shape)), root.mesh.flatten().tolist(), strict=True):
        by_name = dict(zip(root.mesh_dim_names or range(root.ndim), place, strict=True))
        coordinate = tuple(by_name[name] for name in mesh.mesh_dim_names or range(mesh.ndim))
        found[rank] = _place(shape, mesh, placements, coordinate)
    return [found[rank] for rank in range(world_size)]


class Stored(abc.ABC):
    """A tensor in a checkpoint, read when it is asked for and only as far as it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abc.abstractmethod
    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Returns the block of this size that begins there, in its own host memory."""

    def fill(self, tensor: Tensor, offset: tuple[int, ...]) -> None:
        """Gives a tensor the values of the block of its size that begins there."""
        with torch.no_grad():
            tensor.copy_(self.part(offset, tuple(tensor.shape)))

    def whole(self) -> Tensor:
        return self.part((0,) * len(self.shape), self.shape)


@functools.lru_cache(maxsize=4096)
def _place(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]
) -> Box:
    """Returns the part at a place of the mesh; cached for a parameter and its optimizer's state."""
    from torch.distributed.tensor import Partial

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
    return tuple(offset), tuple(sizes)


@functools.lru_cache(maxsize=4096)
def _holders(mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks with the same part, also along axes of a larger mesh that this one leaves out."""
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


def load_module(module: nn.Module, stored: Mapping[str, Any], strict: bool = True) -> None:
    """Loads a module like load_state_dict, whose RuntimeError it raises where something does not fit.

    Spread tensors that fit are passed as they are, and their values are read straight into place after it.
    """
    own = module.state_dict()
    spread = {
        name
        for name, value in stored.items()
        if isinstance(value, (Tensor, Stored))
        and is_spread(mine := own.get(name))
        and tuple(value.shape) == tuple(mine.shape)
    }
    module.load_state_dict(
        {name: own[name] if name in spread else _for_module(value, own.get(name)) for name, value in stored.items()},
        strict=strict,
    )
    # Asked for again: after loading, torch may have given a part that it pads other memory.
    parts = {name: part for name, each in module.state_dict().items() if name in spread and (part := slice_of(each))}
    filled: set[tuple[int, torch.Size]] = set()
    for name, part in parts.items():
        place = (part.tensor.data_ptr(), part.tensor.shape)
        if part.tensor.numel() and place not in filled:  # tied weights are read once
            filled.add(place)
            value = stored[name]
            if isinstance(value, Stored):
                value.fill(part.tensor, part.offset)
            else:
                with torch.no_grad():
                    part.tensor.copy_(take_part(value, part))


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], whole: Collection[int] = ()) -> None:
    """Loads an optimizer. State as large as its parameter is spread like it; all else is whole, and all state of the
    parameters with the numbers `whole`."""
    saved_groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    parameters = {
        number: parameter
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=False)  # torch refuses other numbers
        for number, parameter in zip(saved["params"], group["params"], strict=False)
        if number not in whole
    }
    optimizer.load_state_dict(
        {
            **{key: read_like(value, None) for key, value in state.items() if key != "state"},
            "state": {
                number: {
                    name: read_like(value, None if name == "step" else parameters.get(number))
                    for name, value in entry.items()
                }
                for number, entry in state["state"].items()
            },
        }
    )


def read_like(value: Any, like: Any) -> Any:
    """Returns what is stored, in the form of `like`: spread where that is and has the same shape; whole elsewhere.

    Inside of mappings and lists each entry is compared with its counterpart, if `like` has one.
    """
    if type(value) is dict:
        return {
            key: read_like(each, like.get(key) if isinstance(like, Mapping) else like) for key, each in value.items()
        }
    if type(value) in (list, tuple):
        alike = like if isinstance(like, (list, tuple)) and len(like) == len(value) else [like] * len(value)
        return type(value)(read_like(each, other) for each, other in zip(value, alike, strict=True))
    if not isinstance(value, (Stored, Tensor)):
        return value
    if not is_spread(like) or tuple(value.shape) != tuple(like.shape):
        return value.whole() if isinstance(value, Stored) else value
    part = slice_of(like)
    assert part is not None
    return from_part(take_part(value, part).to(part.tensor.device), like)


def from_part(local: Tensor, like: DTensor) -> DTensor:
    """Returns a tensor that is spread as another one, from this rank's part of it.

    The part stays where it is: DTensor.from_local would move one that is offloaded to the device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(like.device_mesh, like.placements, TensorMeta(like.shape, like.stride(), local.dtype))
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def take_part(value: Tensor | Stored, part: Slice) -> Tensor:
    size = tuple(part.tensor.shape)
    if isinstance(value, Stored):
        return value.part(part.offset, size)
    return value[tuple(slice(begin, begin + count) for begin, count in zip(part.offset, size, strict=True))].clone()


def _for_module(value: Any, mine: Any) -> Any:
    """Returns what load_state_dict is given for a value that is not read straight into place.

    Where it does not fit, its shape is enough to be refused by.
    """
    if isinstance(value, Stored):
        fits = isinstance(mine, Tensor) and tuple(mine.shape) == value.shape
        return value.whole() if fits else torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
