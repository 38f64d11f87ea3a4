"""`python logged_run.py FOLDER SETTINGS`: a run whose rank 0 is killed once, when its loggers have been sent all rows.

It is started again by the launcher, and a second epoch is trained by a resume. Prints what it came to after one epoch,
and what a run without loggers came to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.run import Run

KILL_AT, SAVE_AT, STEPS_PER_EPOCH = 5, 3, 6


def train(run: Run, epochs: int = 1) -> float:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore()
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))
    for epoch in run.epochs(epochs):
        for (batch,) in run.batches(data, 4):
            loss = run.model(batch).square().mean()
            run.log(loss=loss)
            run.backward(loss)
            run.step()
            if run.progress.step == SAVE_AT:
                run.checkpoint()
            if run.progress.step == KILL_AT and run.rank == 0:
                _be_killed_once(run.folder)
        run.log_image("val/picture", torch.full((3, 4, 6), 0.5) if run.rank == 0 else "what others give is ignored")
        run.log_text("story", f"epoch {epoch}")
        run.log_table("answers", ["question", "answer"], [["1+1", 2]])
        run.log(after=float(epoch))
        run.checkpoint()
    return sum(each.double().sum().item() for each in model.parameters())


def _be_killed_once(folder: Path) -> None:
    loggers = sorted((folder / "loggers").glob("*.json"))
    mark = folder / "was-killed"
    if not loggers or mark.exists():
        return
    until = time.monotonic() + 60
    while any(json.loads(each.read_text())["calls"] < KILL_AT - 1 for each in loggers) and time.monotonic() < until:
        time.sleep(0.05)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    launch = partial(lockstep.launch, processes=2, runtime="cpu")
    plain = launch(train, folder=folder.with_name("plain"))
    logged = launch(train, folder=folder, **settings)
    launch(partial(train, epochs=2), folder=folder, **settings)
    print(json.dumps({"plain": plain, "logged": logged}))
