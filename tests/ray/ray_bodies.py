"""Training functions that tests run on Ray's workers; Ray takes them there by name, from this file."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep.ray
from lockstep.config.load import validate
from lockstep.config.schema import RunConfig
from lockstep.ray.session import current

EXAMPLES, BATCH = 60, 12


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(EXAMPLES))


def note(config: dict[str, Any], what: Any) -> None:
    """Write down what this worker saw, for the test to read."""
    rank = ray.train.get_context().get_world_rank()
    with (Path(config["notes"]) / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def plain(config: dict[str, Any]) -> None:
    """Nothing of Lockstep's: what works with Ray's own TorchConfig."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    context = ray.train.get_context()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    note(
        config,
        {
            "sum": total.item(),
            "model": type(model).__name__,
            "world": [context.get_world_rank(), context.get_world_size(), context.get_local_rank()],
            "environment": {name: os.environ.get(name) for name in names},
        },
    )
    ray.train.report({"sum": total.item()})


def own_loop(config: dict[str, Any]) -> None:
    """A loop of one's own on the Run, that a test may have disturbed once."""
    run = lockstep.ray.run()
    torch.manual_seed(run._engine.settings.seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(config.get("dropout", 0.1)), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.setup(model, optimizer)
    restored = run.restore()
    note(config, {"start": run.progress.step, "restored": restored, "world": run.world_size, "pid": os.getpid()})
    for _ in run.epochs(config.get("epochs", 3)):
        for inputs, wanted, numbers in run.batches(dataset(), BATCH):
            loss = (run.model(inputs) - wanted).square().mean()
            run.backward(loss)
            run.step()
            run.log(loss=loss)
            note(config, {"step": run.progress.step, "examples": numbers.tolist()})
            run.checkpoint()
            disturb(config, run.rank, run.progress.step)


def disturb(config: dict[str, Any], rank: int, step: int) -> None:
    once = Path(config["notes"]) / "disturbed"
    if [rank, step] != config.get("at") or once.exists():
        return
    once.touch()
    kind = config["disturb"]
    if kind == "raise":
        raise ValueError("this worker was told to fail")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    if kind == "leave":
        current().requests.leave = "a test"


def look(config: dict[str, Any]) -> None:
    """Where this worker is, from the Run."""
    run = lockstep.ray.run()
    place = run._engine.topology.place
    note(
        config,
        {
            "rank": run.rank,
            "world": run.world_size,
            "local": [place.local_rank, run._engine.topology.local_world_size],
            "host": [place.host_index, run._engine.topology.host_count],
            "device": str(run.device),
            "backend": dist.get_backend(),
            "folder": str(run.folder),
            "same": lockstep.ray.run() is run,
            "sum": sum(run.gather(run.rank + 1, "a sum")),
        },
    )


def look_at_xla(config: dict[str, Any]) -> None:
    """The devices of this worker, the mesh, and what the XLA allocator is told."""
    run = lockstep.ray.run()
    shape = run.devices.mesh.shape  # a method of torch_xla's meshes
    note(
        config,
        {
            "device": str(run.device),
            "strategy": run.devices.strategy,
            "devices": [run.devices.addressable_device_count, run.devices.global_device_count],
            "mesh": list(shape().values()) if callable(shape) else list(shape),
            "axes": list(getattr(run.devices.mesh, "axis_names", None) or run.devices.mesh.mesh_dim_names),
            "allocator": os.environ.get("PJRT_ALLOCATOR_FRACTION"),
        },
    )


def from_ray_data(config: dict[str, Any]) -> None:
    run = lockstep.ray.run()
    torch.manual_seed(0)
    model, _ = run.setup(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.01))
    run.restore()

    def measure(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"value": batch["x"].double(), "square": batch["x"].double() ** 2}

    for epoch in run.epochs(2):
        for batch in lockstep.ray.batches(run, "train", 8):
            loss = (run.model(batch["x"].float()[:, None]).squeeze(1) - batch["x"].float()).square().mean()
            counts = run._engine.feed.step.examples if run._engine.feed.step else 0
            run.backward(loss)
            run.step()
            run.log(loss=loss)
            note(config, {"epoch": epoch, "rows": batch["x"].tolist() if counts else []})
        run.checkpoint()
    means = lockstep.ray.evaluate(run, measure, "val", 8, rows=config["rows"])
    note(config, {"means": means, "examples": run.progress.examples, "epochs": run.progress.epoch})


def task(config: dict[str, Any]) -> None:
    lockstep.ray.fit(validate(RunConfig, config["config"], {}, "a test"))
