"""Ray Train as its documentation has it: prepare_model, a DataLoader, a loop. `plain.py FILE STEPS BATCH`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
import torch.nn.functional as F
from network import Clock, make_data, make_model
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

WORKERS = 2


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    clock = Clock(config["file"], config["steps"])
    main = ray.train.get_context().get_world_rank() == 0
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(make_data(), config["batch"] // WORKERS, shuffle=True))
    step, epoch = 0, 0
    while step < config["steps"]:
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            if main:
                clock.tick()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == config["steps"]:
                break
        epoch += 1
        ray.train.report({"loss": loss.item(), "epoch": epoch})


if __name__ == "__main__":
    file, steps, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    here = str(Path(__file__).parent)
    ray.init(address="local", num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    TorchTrainer(
        train,
        train_loop_config={"file": file, "steps": steps, "batch": batch},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(Path(file).parent / "plain")),
    ).fit()
