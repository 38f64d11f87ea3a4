"""One training loop per way of running it, in a process of its own: `python xla_loops.py NAME STEPS FILE`.

The same convolutional network, batches and optimizer everywhere. FILE gets the time of every step, how much of it the
host took to write the step down, and how many programs were compiled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH, EXAMPLES, DEVICES = 64, 4096, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.fc1, self.fc2 = nn.Linear(32 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2).flatten(1)
        return self.fc2(F.relu(self.fc1(features)))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, 1, 28, 28, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)


class Times:
    """Notes when steps end, and how long the host took to write each of them down."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.traced: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def written_down(self) -> None:
        self.traced.append(time.perf_counter() - self._began)

    def end(self) -> None:
        self.ends.append(time.perf_counter())


def native(steps: int, times: Times) -> int:
    images, labels = data()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        rows = slice(step * BATCH % EXAMPLES, step * BATCH % EXAMPLES + BATCH)
        times.begin()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.written_down()
        times.end()
    return 0


def by_hand(steps: int, times: Times, spmd: bool, threads: int | None = None) -> int:
    """What someone who knows torch_xla would write; with `threads`, someone who measured it too."""
    if threads is not None:
        torch.set_num_threads(threads)
    os.environ.update({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES if spmd else 1)})
    import numpy as np
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    if spmd:
        xr.use_spmd()
    device = torch_xla.device()
    mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("data",)) if spmd else None
    images, labels = data()
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        rows = slice(step * BATCH % EXAMPLES, step * BATCH % EXAMPLES + BATCH)
        inputs, targets = images[rows].to(device), labels[rows].to(device)
        if spmd:
            xs.mark_sharding(inputs, mesh, ("data", None, None, None))
            xs.mark_sharding(targets, mesh, ("data",))
        times.begin()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.written_down()
        torch_xla.sync()
        times.end()
    xm.wait_device_ops()
    return int(metrics.metric_data("CompileTime")[0])


def with_lockstep(steps: int, times: Times, spmd: bool) -> int:
    import lockstep

    def main(run: Any) -> int:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer = run.setup(model, optimizer)
        dataset = TensorDataset(*data())
        for _ in run.epochs(None):
            for images, labels in run.batches(dataset, BATCH, shuffle=False):
                times.begin()
                loss = F.cross_entropy(model(images), labels)
                run.log(loss=loss)
                run.backward(loss)
                times.written_down()
                run.step()
                times.end()
                if run.progress.step == steps:
                    run._engine.runtime.synchronize()
                    return int(run._engine.runtime.compilations())
        raise AssertionError("the steps come to an end before the epochs do")

    with tempfile.TemporaryDirectory() as folder:
        return lockstep.launch(
            main, processes=1, out=folder, runtime="xla", xla={"device": "CPU"},
            devices=DEVICES if spmd else 1, strategy="spmd" if spmd else "single", log={"every": "50 steps"},
        )[0]  # fmt: skip


LOOPS = {
    "native": native,
    "by-hand": lambda steps, times: by_hand(steps, times, spmd=False),
    "lockstep": lambda steps, times: with_lockstep(steps, times, spmd=False),
    "by-hand-spmd": lambda steps, times: by_hand(steps, times, spmd=True),
    "by-hand-1-thread": lambda steps, times: by_hand(steps, times, spmd=False, threads=1),
    "by-hand-spmd-1-thread": lambda steps, times: by_hand(steps, times, spmd=True, threads=1),
    "lockstep-spmd": lambda steps, times: with_lockstep(steps, times, spmd=True),
}

if __name__ == "__main__":
    name, steps, file = sys.argv[1:]
    torch.manual_seed(0)
    times = Times()
    compilations = LOOPS[name](int(steps), times)
    Path(file).write_text(json.dumps({"ends": times.ends, "traced": times.traced, "compilations": compilations}))
