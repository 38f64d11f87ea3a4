"""Training with torch's fully_shard as one writes it by hand: what Lockstep's sharding is measured beside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def mesh_of_all(device_type: str) -> DeviceMesh:
    """One mesh over all processes, which torchrun has numbered; several may share a GPU, which NCCL refuses."""
    world_size = int(os.environ["WORLD_SIZE"])
    shared = device_type == "cpu" or world_size > torch.cuda.device_count()
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if shared else "nccl")
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))


def sharded(
    make: Callable[[], nn.Module],
    blocks: str,
    mesh: DeviceMesh,
    activation_checkpointing: bool,
    compiled: bool,
    bf16: bool,
) -> nn.Module:
    """A model whose blocks (the list of that name) are recomputed, compiled and sharded, in this order, then the rest.

    It is made without memory, and each rank makes the values of its own shards: no rank ever has the whole.
    """
    with torch.device("meta"):
        model = make()
    layers: nn.ModuleList = model.get_submodule(blocks)  # type: ignore[assignment]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for index, layer in enumerate(list(layers)):
        wrapped: Any = checkpoint_wrapper(layer) if activation_checkpointing else layer
        if compiled:
            wrapped = torch.compile(wrapped)  # not wrapped.compile(): the hooks that gather weights stay outside
        fully_shard(wrapped, mesh=mesh, mp_policy=policy)
        layers[index] = wrapped
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    fill(model.named_parameters())
    return model


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Values to start from that a network can be trained from; quickly, and of whole tensors or of shards."""
    for name, parameter in parameters:
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
