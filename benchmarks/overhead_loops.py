"""The loops that overhead.py measures, one per framework, each as its own documentation writes it.

python benchmarks/overhead_loops.py NAME PROCESSES STEPS STAMPS_FILE      (under torchrun for more than one process)
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import BATCH, Probe, make_data, make_model, make_optimizer


def plain(processes: int, probe: Probe) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    data, model, sampler = make_data(), make_model(), None
    if processes > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(data)
        model = DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    loader = DataLoader(data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
    step = epoch = 0
    while step < probe.steps:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            loss.backward()
            optimizer.step()
            step += 1
            if step == probe.steps:
                break
        epoch += 1
    if processes > 1:
        dist.destroy_process_group()


def fabric(processes: int, probe: Probe) -> None:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
    engine.launch()
    model = make_model()
    model, optimizer = engine.setup(model, make_optimizer(model))
    loader = engine.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH, shuffle=True))
    step = 0
    while step < probe.steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            engine.backward(loss)
            optimizer.step()
            step += 1
            if step == probe.steps:
                break


def lightning(processes: int, probe: Probe) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return probe.loss(self, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=probe.steps,
        barebones=True,  # no logger, checkpoints, progress bar, summary or sanity check
    )
    trainer.fit(Module(), DataLoader(make_data(), batch_size=BATCH, shuffle=True))


def accelerate(processes: int, probe: Probe) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes
    model = make_model()
    loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    step = 0
    while step < probe.steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = probe.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == probe.steps:
                break
    accelerator.end_training()


def lockstep_run(processes: int, probe: Probe) -> None:
    import lockstep

    with tempfile.TemporaryDirectory() as out:
        log = {"every": "50 steps"}
        lockstep.launch(partial(_own_loop, probe), processes=processes, runtime="cpu", out=out, log=log)


def _own_loop(probe: Probe, run: Any) -> None:
    model: nn.Module = make_model()
    model, optimizer = run.setup(model, make_optimizer(model))
    data = make_data()
    while run.progress.step < probe.steps:
        for batch in run.batches(data, BATCH * run.world_size):
            loss = probe.loss(model, batch)
            run.log(loss=loss)
            run.backward(loss)
            run.step(optimizer)
            if run.progress.step == probe.steps:
                break


LOOPS = {
    "plain": plain,
    "fabric": fabric,
    "lightning": lightning,
    "accelerate": accelerate,
    "lockstep-run": lockstep_run,
}

if __name__ == "__main__":
    name, processes, steps, file = sys.argv[1:]
    torch.manual_seed(0)
    LOOPS[name](int(processes), Probe(int(steps), file))
