"""What ranks do in tests of models that the user's own function splits."""

from __future__ import annotations

from typing import Any

import sharded_bodies
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lockstep

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def like_torchtitan(model: Any, mesh: Any) -> nn.Module:
    """Tensor parallelism, activation checkpointing, then fully_shard of every layer and of the rest."""
    for number, layer in enumerate(model.layers):
        parallelize_module(layer, mesh["model"], PLAN)
        model.layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def tensor_parallel_alone(model: Any, mesh: Any) -> None:
    """Leaves the data axis to Lockstep."""
    for layer in model.layers:
        parallelize_module(layer, mesh["model"], PLAN)


def a_wrapper(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else nn.Sequential(model)


def a_plain_part(model: Any, mesh: Any) -> None:
    model.odd = nn.Parameter(model.odd.detach()[:3].clone())


def compiled(model: Any, mesh: Any) -> None:
    model.layers[0] = torch.compile(model.layers[0])


def without_the_data_axis(model: Any, mesh: Any) -> None:
    parallelize_module(model.layers[0], mesh["model"], PLAN)
    split = {each for each in model.layers[0].parameters() if hasattr(each, "device_mesh")}
    fully_shard(model, mesh=mesh["data"], ignored_params=split)


def continued(run: lockstep.Run, epochs: int, parallelize: Any = None) -> dict[str, Any]:
    model = run._engine.strategy.build(sharded_bodies.Language)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    model, optimizer = run.setup(model, optimizer, clip_norm=0.5, parallelize=parallelize)
    run.restore()
    drawn = torch.rand(2).tolist()
    for _ in run.epochs(epochs):
        for batch in run.batches(sharded_bodies.sentences(20), 8):
            total, count = sharded_bodies.token_loss(model, batch)
            run.backward(total, count=count)
            run.step()
        run.checkpoint()
    weights = {name: sharded_bodies.whole(each) for name, each in run.module.named_parameters()}
    return {"weights": weights, "drawn": drawn, "next": torch.rand(2).tolist()}
