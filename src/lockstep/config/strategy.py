"""The `strategy` section, and the device meshes that it declares. Needs neither torch nor a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lockstep.config.values import Section, as_mapping, import_path
from lockstep.errors import ConfigError

# Strategies with a mesh: of processes on cpu and cuda, of devices on xla. `spmd` is for xla alone.
MESH_TYPES = ("fsdp", "hsdp", "tensor", "spmd")
COMM_HOOKS = ("bf16_compress", "fp16_compress", "powerSGD")


def _mesh_shape(shape: dict[str, int]) -> dict[str, int]:
    if not shape:
        raise ValueError("a mesh needs at least one axis, for example {data: -1}")
    wrong = [f"{axis}: {size}" for axis, size in shape.items() if size == 0 or size < -1]
    if wrong:
        raise ValueError(f"the size of an axis is 1 or more, or -1 for the rest; got {', '.join(wrong)}")
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"only one axis can be -1, the rest; got {shape}")
    return shape


def _as_rule(value: Any) -> Any:
    """A bare list stands for a rule over `strategy.mesh`."""
    return {"spec": value} if isinstance(value, list | tuple) else value


def _hook_name(text: str) -> str:
    if text in COMM_HOOKS:
        return text
    if "." not in text and ":" not in text:
        raise ValueError(f"must be {', '.join(COMM_HOOKS)}, or an import path such as package.module:function")
    return import_path(text)


MeshShape = Annotated[dict[str, int], AfterValidator(_mesh_shape)]
# The axes that shard one dimension of a tensor.
AxisNames = str | Annotated[tuple[str, ...], Field(strict=False)] | None


class ShardRule(Section):
    """How parameters are sharded: an axis name (or several, or null) for every dimension."""

    spec: tuple[AxisNames, ...] = Field(strict=False)
    mesh: str | None = Field(None, description="one of strategy.meshes; defaults to strategy.mesh")
    activations: Literal["whole", "split"] = Field(
        "whole", description="split: outputs of column-parallel and inputs of row-parallel layers stay sharded"
    )


class CommHook(Section):
    """How DDP exchanges a bucket of gradients: one of torch's hooks, or a custom function."""

    type: Annotated[str, AfterValidator(_hook_name)] = Field(
        description="bf16_compress, fp16_compress, powerSGD, or the import path of a function (state, bucket)"
    )
    rank: int = Field(1, gt=0, le=1024, description="powerSGD: of the matrices that travel in place of gradients")
    start: int = Field(
        1000, gt=1, description="powerSGD: the step from which on it compresses, counted anew after a resume"
    )

    @model_validator(mode="after")
    def _numbers_are_for_power_sgd(self) -> CommHook:
        given = [name for name in ("rank", "start") if getattr(self, name) != CommHook.model_fields[name].default]
        if given and self.type != "powerSGD":
            raise ValueError(f"{given[0]} is for type: powerSGD, but the type is {self.type}")
        return self


class Strategy(Section):
    """How the model and the batch are distributed over processes and devices."""

    type: Literal["auto", "single", "ddp", "fsdp", "hsdp", "tensor", "threads", "spmd"] = Field(
        "auto",
        description="fsdp: shard every block over data; hsdp: the same with a copy per index of the axis replica; "
        "tensor: shard by the rules in shard; threads, spmd: xla only",
    )
    find_unused_parameters: bool = False
    output_device: int | None = Field(None, ge=0)
    bucket_mb: int = Field(25, gt=0, le=2**40)
    static_graph: bool = Field(False, description="ddp: every step uses the same parameters in the same way")
    gradient_as_bucket_view: bool | None = Field(
        None, description="ddp: gradients are views into the communication buckets; null: on GPUs"
    )
    sync_batchnorm: bool = Field(False, description="BatchNorm uses the statistics of all processes")
    comm_hook: Annotated[CommHook, as_mapping(CommHook)] | None = Field(
        None, description="ddp: how buckets of gradients are exchanged"
    )
    mesh: MeshShape | None = Field(None, description="axes and their sizes; -1 takes the remaining devices")
    meshes: dict[str, MeshShape] = Field({}, description="more meshes over the same devices, by name")
    shard: dict[str, Annotated[ShardRule, BeforeValidator(_as_rule)]] = Field(
        {}, description="parameter-name pattern -> how to shard it; the first match counts"
    )
    blocks: str | None = Field(
        None, min_length=1, description="pattern of the names of the model's blocks; null: found automatically"
    )
    offload: bool = Field(False, description="keep parameters and optimizer state in host memory (CUDA)")
    param_dtype: Literal["float32", "bf16"] = Field(
        "float32", description="the dtype in which a block's parameters are gathered; bf16 halves traffic and memory"
    )
    reduce_dtype: Literal["float32", "bf16"] = Field(
        "float32", description="fsdp: the dtype in which gradients are added over ranks; bf16 halves the traffic"
    )
    reshard_after_forward: bool = Field(
        True, description="fsdp: free a block's parameters after its forward pass; false: gather them once per step"
    )

    @model_validator(mode="after")
    def _some_are_for_meshes(self) -> Strategy:
        given = [name for name in ("mesh", "meshes", "shard", "offload") if getattr(self, name)]
        given += self.given_for_blocks
        if given and not self.has_mesh:
            raise ValueError(f"{given[0]} is for strategy: fsdp, hsdp or tensor, but the strategy is {self.type}")
        return self

    @property
    def given_for_blocks(self) -> list[str]:
        """The options for how blocks are gathered and reduced that have another value than the default."""
        names = ("param_dtype", "reduce_dtype", "reshard_after_forward")
        return [name for name in names if getattr(self, name) != Strategy.model_fields[name].default]

    @property
    def has_mesh(self) -> bool:
        return self.type in MESH_TYPES

    @property
    def splits_sequences(self) -> bool:
        return CONTEXT_AXIS in (self.mesh or ())

    @property
    def splits_all(self) -> bool:
        return self.type in ("fsdp", "hsdp")

    def has_bucket_views(self, on_gpu: bool) -> bool:
        return on_gpu if self.gradient_as_bucket_view is None else self.gradient_as_bucket_view

    @property
    def given_for_ddp(self) -> list[str]:
        """The options that only torch's DistributedDataParallel supports."""
        names = ("static_graph", "gradient_as_bucket_view", "comm_hook")
        return [name for name in names if getattr(self, name)]

    @model_validator(mode="after")
    def _some_are_for_ddp(self) -> Strategy:
        if self.given_for_ddp and self.type not in ("auto", "ddp"):
            raise ValueError(f"{self.given_for_ddp[0]} is for strategy: ddp, but the strategy is {self.type}")
        if self.sync_batchnorm and self.type in ("single", "threads", "spmd"):
            raise ValueError(f"sync_batchnorm is for ddp, fsdp, hsdp and tensor, but the strategy is {self.type}")
        return self


MAIN = "strategy.mesh"
DATA_AXIS, REPLICA_AXIS, CONTEXT_AXIS = "data", "replica", "context"
BATCH_AXES = (REPLICA_AXIS, DATA_AXIS)  # the axes that batches are split over, in this order

Shape = Mapping[str, int]


def resolve_meshes(settings: Strategy, devices: int, remedy: str = "devices") -> dict[str, dict[str, int]]:
    """Returns every mesh with its sizes, the main one first. Raises ConfigError unless each uses all devices.

    `remedy` names what else a user can change.
    """
    shapes = {MAIN: settings.mesh or {DATA_AXIS: -1}}
    shapes |= {f"strategy.meshes.{name}": shape for name, shape in settings.meshes.items()}
    resolved = {name: _resolved(name, shape, devices, remedy) for name, shape in shapes.items()}
    _check_axes(settings.type, resolved[MAIN])
    return resolved


def dp_size(shape: Shape) -> int:
    """Returns into how many parts a mesh splits a batch."""
    return math.prod(shape.get(axis, 1) for axis in BATCH_AXES)


def spans_processes(settings: Strategy, runtime: str) -> bool:
    """Whether the mesh is made of processes; XLA has a mesh of devices."""
    return settings.has_mesh and runtime in ("cpu", "cuda")


def batch_shares(settings: Strategy, runtime: str, processes: int) -> int:
    """Returns into how many parts a batch is split: one per process, unless a mesh says otherwise."""
    if not spans_processes(settings, runtime):
        return processes
    return dp_size(resolve_meshes(settings, processes, "processes")[MAIN])


def processes_of(settings: Strategy) -> int | None:
    """Returns how many processes a mesh needs, or None if it takes all."""
    sizes = list((settings.mesh or {DATA_AXIS: -1}).values())
    return None if -1 in sizes else math.prod(sizes)


def _check_axes(strategy: str, shape: Shape) -> None:
    text = ", ".join(f"{axis}: {size}" for axis, size in shape.items())
    needed = {"fsdp": (DATA_AXIS,), "hsdp": BATCH_AXES}.get(strategy, ())
    missing = [axis for axis in needed if axis not in shape]
    if missing:
        example = ", ".join(f"{axis}: {2 if axis == REPLICA_AXIS else -1}" for axis in needed)
        raise ConfigError(
            f"strategy: {strategy} needs an axis {missing[0]!r}, but {MAIN} is {{{text}}}: write for example "
            f"mesh: {{{example}}}"
        )
    if CONTEXT_AXIS in shape and strategy != "fsdp":
        raise ConfigError(
            f"{MAIN}: {{{text}}}: the axis {CONTEXT_AXIS!r} splits sequences, with strategy: fsdp, but the strategy is "
            f"{strategy}"
        )
    if REPLICA_AXIS in shape and strategy != "hsdp":
        raise ConfigError(
            f"{MAIN}: {{{text}}}: the axis {REPLICA_AXIS!r} is for strategy: hsdp, which keeps a copy of the model per "
            f"index; name it {DATA_AXIS!r}, or set type: hsdp"
        )


def _resolved(name: str, shape: Shape, devices: int, remedy: str) -> dict[str, int]:
    known = math.prod(size for size in shape.values() if size != -1)
    text = ", ".join(f"{axis}: {size}" for axis, size in shape.items())
    if -1 in shape.values():
        if devices % known:
            raise ConfigError(
                f"{name}: {{{text}}}: the sizes that are given make {known}, which does not divide the {devices} "
                f"devices; change them, or {remedy}"
            )
        return {axis: devices // known if size == -1 else size for axis, size in shape.items()}
    if known != devices:
        raise ConfigError(
            f"{name}: {{{text}}} is a mesh of {known} devices, but there are {devices}; change a size (-1 is "
            f"whatever the others leave over), or {remedy}"
        )
    return dict(shape)
