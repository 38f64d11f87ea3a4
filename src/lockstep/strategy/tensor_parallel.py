"""Tensor parallelism: layers whose weight is split over an axis of the mesh, each rank computing a part.

A Linear layer is column-parallel where its outputs are split, row-parallel where its inputs are; an Embedding likewise
by its features or its vocabulary. By themselves the layers take and return whole activations, so that any code around
them is right. With `activations: split` a column-parallel layer leaves its part on every rank, and a row-parallel one
takes it from there, without an exchange between the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lockstep.config.strategy import BATCH_AXES, Shape, ShardRule
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy.mesh import MAIN, Ruled, axes_of, spec_text
from lockstep.strategy.slices import local_part, slice_of

# Norms of gradients that are the same but for rounding, relative to themselves and to the largest of a model.
_APART, _NOISE = 1e-2, 1e-5
_CAN = "rules on cpu and cuda split the weight of nn.Linear and nn.Embedding over one axis"


def make_mesh(runtime: Runtime, group: Group, sizes: Mapping[str, int], first: Sequence[str]) -> DeviceMesh:
    """Makes a mesh over all ranks in rank order, the last axis running fastest. Waits have the run's limit.

    Torch wants the axes that batches are split over before all others, whatever their order in the config.
    """
    group.join_alone(runtime.backend)
    axes = [axis for axis in first if axis in sizes] + [axis for axis in sizes if axis not in first]
    ranks = torch.arange(group.world_size).view(*sizes.values()).permute([list(sizes).index(axis) for axis in axes])
    with group.activity.within("making the mesh", waits=group.world_size > 1), group.closed_to_others():
        groups = [_along(ranks, dimension, group, runtime.mesh_backend) for dimension in range(ranks.dim())]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        runtime.device.type,
        mesh=ranks,
        mesh_dim_names=tuple(axes),
    )


def _along(ranks: torch.Tensor, dimension: int, group: Group, backend: str) -> dist.ProcessGroup:
    """Returns the group of this rank along one axis, after making those of all ranks in the same order."""
    mine: dist.ProcessGroup | None = None
    lines = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    for line in lines:
        made = dist.new_group(line, backend=backend, timeout=timedelta(seconds=group.timeout))
        if group.rank in line:
            mine = made
    assert mine is not None
    return mine


@dataclass(frozen=True)
class Split:
    """How one parameter is split over one axis; the bias of a row-parallel layer is whole, and added once."""

    axis: str
    placement: Placement


@dataclass(frozen=True)
class Layer:
    """The axis that a layer is split over, and what it does with its activations."""

    axis: str
    takes: Placement  # what the arithmetic needs of the input
    takes_split: bool  # whether the input comes that way
    leaves_split: bool


@dataclass(frozen=True)
class Plan:
    parameters: Mapping[str, Split]
    layers: Mapping[str, Layer]  # by the name of the module


def plan(model: nn.Module, ruled: Mapping[str, Ruled], shape: Shape) -> Plan:
    """Returns what rules mean for the layers of a model; one that cannot be followed is refused by name."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module, key))
    by_name = dict(model.named_parameters())
    splits: dict[str, Split] = {}
    layers: dict[str, Layer] = {}
    for name, each in ruled.items():
        found = _split(name, each, shape)
        if found is None:
            continue
        for module_name, module, key in owners[id(by_name[name])]:
            if key != "weight" or not isinstance(module, (nn.Linear, nn.Embedding)):
                if isinstance(module, nn.Linear) and key == "bias":
                    continue  # goes with its weight, and is looked at below
                raise _refused(name, each, f"it belongs to a {type(module).__name__} ({module_name or 'the model'})")
            if isinstance(module, nn.Embedding) and module.max_norm is not None:
                raise _refused(name, each, "an Embedding with max_norm changes its weight in the forward pass")
            splits[name] = found
            layers[module_name] = _layer(module, found, each.rule)
            if isinstance(module, nn.Linear) and module.bias is not None:
                columns = isinstance(found.placement, Shard) and found.placement.dim == 0
                splits[_joined(module_name, "bias")] = Split(found.axis, Shard(0) if columns else Replicate())
    _check_biases(ruled, by_name, splits, shape)
    return Plan(splits, layers)


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Adds hooks that turn the inputs and outputs of split layers into what their weights need."""
    for name, layer in plan.layers.items():
        axis = mesh[layer.axis]
        module = model.get_submodule(name)
        module.register_forward_pre_hook(_entrance(axis, layer))
        module.register_forward_hook(_exit(layer))


def check_gradients(model: nn.Module, plan: Plan, mesh: DeviceMesh, group: Group) -> None:
    """Refuses a parameter between two layers with `activations: split`: a rank has the gradient of some features, where
    it needs that of all. Other parameters have the same on all ranks along the axis that have the same part."""
    axes = sorted({each.axis for each in plan.layers.values() if each.leaves_split})
    named = {name: each for name, each in model.named_parameters() if axes and each.grad is not None}
    norms = [local_part(each.grad).norm() for each in named.values()]  # type: ignore[arg-type]
    if not axes or any(isinstance(each, FakeTensor) for each in norms):  # the latter in a plan
        return
    mine = dict(zip(named, map(float, norms), strict=True))
    ranks: list[dict[str, float]] = group.gather(mine, "the norms of gradients")
    for axis, (name, each) in itertools.product(axes, named.items()):
        part, line = slice_of(each), mesh[axis].mesh.tolist()
        alike = [ranks[rank].get(name, 0.0) for rank in line if part is None or rank in part.holders]
        if max(alike) - min(alike) > max(_APART * max(alike), _NOISE * max(mine.values())):
            raise ConfigError(
                f"strategy.shard: {name!r} lies between layers with activations: split, where a rank has some of the "
                "features: it would learn from those alone. Leave activations: split out of the rules for these layers"
            )


def part_of(value: Tensor, split: Split, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(value, mesh[split.axis], [split.placement], src_data_rank=None)


def _entrance(axis: DeviceMesh, layer: Layer) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    comes: list[Placement] = [layer.takes if layer.takes_split else Replicate()]

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *rest = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, axis, comes, run_check=False)
        return (first.redistribute(placements=[layer.takes]), *rest)

    return enter


def _exit(layer: Layer) -> Callable[[nn.Module, Any, DTensor], Tensor]:
    leaves: list[Placement] = [Shard(-1) if layer.leaves_split else Replicate()]
    return lambda module, inputs, output: output.redistribute(placements=leaves).to_local()


def _split(name: str, each: Ruled, shape: Shape) -> Split | None:
    """None where the axis has one place, and nothing is split."""
    if each.mesh != MAIN:
        raise _refused(name, each, "it goes by a mesh of its own, and on cpu and cuda there is one, strategy.mesh")
    used = [(dimension, axis) for dimension, entry in enumerate(each.rule.spec) for axis in axes_of(entry)]
    over_data = [axis for _, axis in used if axis in BATCH_AXES]
    if over_data:
        raise _refused(name, each, f"it is split over {over_data[0]}, which strategy: fsdp does, for all parameters")
    used = [(dimension, axis) for dimension, axis in used if shape[axis] > 1]
    if len(used) > 1:
        raise _refused(name, each, f"it is split over {len(used)} axes")
    return Split(used[0][1], Shard(used[0][0])) if used else None


def _layer(module: nn.Module, split: Split, rule: ShardRule) -> Layer:
    assert isinstance(split.placement, Shard)
    stays = rule.activations == "split"
    outputs_split = split.placement.dim == (0 if isinstance(module, nn.Linear) else 1)
    if outputs_split:
        return Layer(split.axis, Replicate(), takes_split=False, leaves_split=stays)
    # A row of an embedding is looked up by its number, which all ranks have.
    takes: Placement = Shard(-1) if isinstance(module, nn.Linear) else Replicate()
    return Layer(split.axis, takes, takes_split=stays and isinstance(module, nn.Linear), leaves_split=False)


def _check_biases(
    ruled: Mapping[str, Ruled],
    parameters: Mapping[str, nn.Parameter],
    splits: Mapping[str, Split],
    shape: Shape,
) -> None:
    """A bias is split as the outputs of its layer are; a rule must not say otherwise."""
    for name, each in ruled.items():
        if name in splits and parameters[name].dim() > 1:
            continue
        asked = _split(name, each, shape)
        if asked is not None and splits.get(name) != asked:
            raise _refused(name, each, "the weight of its layer is not split along its outputs over this axis")


def _refused(name: str, each: Ruled, why: str) -> ConfigError:
    return ConfigError(
        f"strategy.shard.{each.pattern}: {name!r} cannot be split as {spec_text(each.rule.spec)}: {why}; {_CAN}"
    )


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
